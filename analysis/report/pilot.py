"""Warnings from a pilot about designs in which no estimator of the KL could make a difference."""

from collections.abc import Iterator

import numpy as np

from analysis.results.artifacts import GradientStudy
from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.gradient_noise import NoiseSnapshot
from analysis.stats.intervals import Estimate
from analysis.stats.text import interval_text, number
from lit_klrb import schema

# Share of the KL in the noise of the whole gradient below which its estimator hardly matters.
LEAST_SHARE = 0.05


def warnings(pilot: Sweep) -> list[str]:
    """One line per reason to doubt that a sweep like the pilot can show a difference."""
    return [*_still(pilot), *_drowned(pilot)]


def _still(pilot: Sweep) -> Iterator[str]:
    """The betas at which J does not rise between the start of training and its end."""
    for index, beta in pilot.plan.grid.beta.items():
        runs = [run for run in pilot.grid.values() if run.point.beta_index == index and not run.diverged]
        rises = [rise for run in runs if (rise := _rise(run, beta)) is not None]
        mean = Estimate.of_mean(np.array(rises))
        interval = mean.interval()
        if interval is not None and interval.low <= 0:
            yield (
                f"at beta {beta:g} J does not rise in training: {number(mean.value)}, "
                f"{interval_text(interval)} over {len(rises)} runs"
            )


def _rise(run: Run, beta: float) -> float | None:
    start = {key: run.first(key) for key in (schema.REWARD, schema.KL)}
    if None in start.values():
        return None
    rises = {key: run.outcome(key) - float(value or 0.0) for key, value in start.items()}
    return rises[schema.REWARD] - beta * rises[schema.KL]


def _drowned(pilot: Sweep) -> Iterator[str]:
    """A warning if the KL's gradient is a small part of the noise of the whole gradient."""
    found = pilot.study(GradientStudy)
    if found is None:
        return
    study, control = found[1], pilot.plan.primary.control
    name = control if control in study.estimators else study.estimators[0]
    snapshots = [NoiseSnapshot(one.step, one.gram, study.estimators) for one in study.snapshots]
    share = max(one.noise("KL", name) / one.noise("total", name) for one in snapshots)
    if share < LEAST_SHARE:
        yield (
            f"the KL's gradient under {name} has at most {share:.1%} of the whole gradient's noise (beta "
            f"{study.snapshots[0].beta:g}): another estimator of the KL would hardly change it"
        )
