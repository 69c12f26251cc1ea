"""What a planned sweep would show, from the differences of a pilot, and warnings."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.checks import load_sweep
from analysis.report.matching import match, objective_at_start
from analysis.results import Plan
from analysis.results.artifacts import GradientStudy
from analysis.results.records import OBJECTIVE
from analysis.results.sweep import Sweep
from analysis.stats.comparison import primary_contrast
from analysis.stats.contrast import mean_of
from analysis.stats.gradient_noise import NoiseSnapshot
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.power import Design
from analysis.stats.prompts import noise_share
from analysis.stats.text import interval_text, number
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

# Share of the KL in the noise of the whole gradient below which its estimator hardly matters.
LEAST_SHARE = 0.05


def warnings(sweep: Sweep) -> Iterator[str]:
    """One line per reason to doubt that a sweep can show a difference.

    Such as a beta at which J does not rise in training, or a KL whose gradient is a small part of the noise.
    """
    if sweep.plan.primary.outcome == schema.KL:  # they are about J
        return
    for index, beta in sweep.plan.grid.beta.items():
        runs = [run for run in sweep.grid.values() if run.point.beta_index == index and not run.diverged]
        rises = np.array([run.outcome(OBJECTIVE) - objective_at_start(sweep, run) for run in runs])
        mean = Estimate.of_mean(rises[np.isfinite(rises)])
        if (interval := mean.interval()) is not None and interval.low <= 0:
            yield (
                f"at beta {beta:g} J does not rise in training: {number(mean.value)}, "
                f"{interval_text(interval)} over {np.isfinite(rises).sum()} runs"
            )
    for _, study in sweep.studies(GradientStudy)[:1]:
        control = sweep.plan.primary.control
        name = control if control in study.estimators else study.estimators[0]
        snapshots = [NoiseSnapshot(one.step, one.gram, study.estimators) for one in study.snapshots]
        share = max(one.noise("KL", name) / one.noise("total", name) for one in snapshots)
        if share < LEAST_SHARE:
            yield (
                f"the KL's gradient under {name} has at most {share:.1%} of the whole gradient's noise (beta "
                f"{study.snapshots[0].beta:g}): another estimator of the KL would hardly change it"
            )


def design_of(plan: Plan) -> Design:
    """The comparison of each arm with the control that a plan makes."""
    return Design(len(plan.grid.beta), plan.grid.replicates, len(plan.grid.blocks), plan.level)


def power(plan: Plan, pilot: Path | None) -> Iterator[str]:
    """Lines for `analysis plan`: the test, what it detects, and how many replicates less would need.

    Args:
        plan: The plan; each treatment is compared with the control at the level of each comparison.
        pilot: The directory of an earlier sweep with the plan's control and one of its other arms.

    Raises:
        ConfigurationError: If the pilot has no such arms, or too few runs to estimate variances, or no
            rewards where the plan decides by J.
    """
    design = design_of(plan)
    subject, unit = ("the KL", "nats") if plan.primary.outcome == schema.KL else ("J", "reward units")
    units = f"{design.units} pairs"
    test = f"swap test of {units}"
    if design.by_t:
        units = f"{design.units} {'blocks' if design.over_blocks else 'differences'}"
        test = f"t test {'over' if design.over_blocks else 'of'} {units}"
    yield f"  {test}, level {plan.level:.2g}"
    if design.reach() is None:
        best = "" if design.by_t else f" (best possible: {2.0 ** (1 - design.units):.2g})"
        enough = design.grown(lambda one: one.reach() is not None)
        yield f"  {units} CANNOT reach p ≤ {plan.level:.2g}{best}; needs {_size(enough)}"
        return
    if pilot is None:
        reach = _detected(design, 1.0, math.inf)
        sds = f"{number(reach)} SDs of single ones"
        yield f"power, no pilot: 80 % for a mean difference in {subject} of {sds}"
        return
    pilot_sweep = _trusted(pilot)
    pairs, spread, freedom = _measured(plan, pilot_sweep)
    kept = f"{len(pairs.finite)} of {len(pairs)} pairs"
    yield f"power, from {kept} of {pairs.treatment} against {pairs.control} in {pilot_sweep.directory}"

    def detects(target: float) -> Callable[[Design], bool]:
        return lambda one: (_detected(one, spread, freedom) or math.inf) <= target

    reach = _detected(design, spread, freedom)
    assert reach is not None
    same = " if blocks do not differ, which the pilot does not show"
    yield (
        f"  difference in {subject} detected with 80 % power: {number(reach)} {unit}"
        f"{same if design.over_blocks and not pairs.over_blocks else ''}"
    )
    margin = plan.primary.margins.get(plan.primary.outcome)
    for what, target in (("half of it,", reach / 2), *((("the margin,", margin),) if margin else ())):
        yield f"  {what} {number(target)}, needs {_size(design.grown(detects(target)))}"
    if pilot_sweep.plan.primary.outcome == plan.primary.outcome and (noise := noise_share(_by_beta(pairs))):
        yield f"  evaluation noise is {noise} of the variance of a pair's difference in {subject}, 95% CI"
    yield from (f"  WARNING: {text}" for text in warnings(pilot_sweep))


def power_numbers(plan: Plan, pilot: Path | None) -> dict[str, Any]:
    """What `power` says, for programs; raises as it does.

    `detected` is the difference that the design detects with 80 % power: in standard deviations of a
    difference without a pilot, in reward units or nats with one, null where it cannot reject at all.
    """
    design = design_of(plan)
    spread, freedom = (1.0, math.inf) if pilot is None else _measured(plan, _trusted(pilot))[1:]
    return {
        "test": "t" if design.by_t else "swaps",
        "units": design.units,
        "level": plan.level,
        "can_reject": design.reach() is not None,
        "detected": None if design.reach() is None else _detected(design, spread, freedom),
        "pilot": pilot and str(pilot),
    }


def _trusted(pilot: Path) -> Sweep:
    found = load_sweep(pilot)
    if found.invalid:
        raise ConfigurationError(f"--pilot: {pilot} cannot be trusted: {found.invalid[0]}")
    return found


def _size(design: Design | None) -> str:
    """The size of a design, in words."""
    if design is None:
        return "more than 1,000 replicates"
    return f"{design.replicates} replicates{f' in {design.blocks} blocks' if design.over_blocks else ''}"


def _detected(design: Design, spread: float, freedom: float) -> float | None:
    """The difference that a design detects, from the SD of its units."""
    reach = design.reach(freedom)
    return None if reach is None else reach * spread / math.sqrt(design.units)


def _measured(plan: Plan, pilot: Sweep) -> tuple[Pairs, float, float]:
    """The pairs of a pilot, and the SD of the design's units with its degrees of freedom."""
    if pilot.plan.primary.outcome == schema.KL != plan.primary.outcome:
        raise ConfigurationError(
            f"--pilot: {pilot.directory} decides by the KL alone, so it has no spread of rewards"
        )
    design = design_of(plan)
    for name in plan.comparisons:
        pairs = match(pilot, name, plan.primary.control)
        if not design.over_blocks:  # the power is that of a test of pairs
            pairs = replace(pairs, blocks=0)
        finite = pairs.finite
        if len(finite.beta_indices) < len(pilot.plan.grid.beta):
            continue
        mean = mean_of(primary_contrast(finite, plan.primary.outcome), finite)
        units = len(np.unique(finite.block)) if finite.over_blocks else len(finite)
        if mean.degrees > 0:
            spread = mean.standard_error * math.sqrt(units)
            if design.over_blocks and not finite.over_blocks:  # a block's mean is that of several pairs
                spread /= math.sqrt(len(plan.grid.beta) * plan.grid.replicates / design.blocks)
            return pairs, spread, mean.degrees
    raise ConfigurationError(
        f"--pilot: {pilot.directory} has no two matched runs at each beta of {plan.primary.control} and one "
        f"of {', '.join(plan.comparisons)}"
    )


def _by_beta(pairs: Pairs) -> list[FloatArray]:
    """The differences on each prompt, by beta, of pairs in which no run diverged; empty if unknown."""
    pairs = pairs.finite
    if pairs.prompts is None:
        return []
    return [pairs.prompts[pairs.beta_index == index] for index in pairs.beta_indices]
