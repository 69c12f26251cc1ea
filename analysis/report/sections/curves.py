"""Training curves: the mean of each arm with its interval, and single runs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import MANY, Look, legend_lines, looks, sheet
from analysis.results.records import Curve, Run
from analysis.stats.text import whole_percent
from lit_klrb import schema

METRICS = {schema.REWARD: "mean reward", schema.KL: "KL (nats)"}
SOURCES = {
    "train": "on the prompts of each training step",
    "val": "by the common evaluator, on the same prompts for every run",
}
NAMES = {"train": "Training", "val": "Validation"}
# What carries no signal: shares of each training step, or a number of rows, where a run logs them.
_LOST: dict[str, tuple[str, Callable[[float], str]]] = {
    "equal_rewards": ("Prompts whose completions have equal rewards", whole_percent),
    "unfinished": ("Completions cut at their largest length", whole_percent),
    "left_out": ("Rows of the data left out", "{:.0f}".format),
}
# Lines are thinned to about this many points, more than a screen can show.
_POINTS = 400


def training_curves(assessment: Assessment) -> Section | None:
    """One figure for training and one for validation, with one row per β."""
    drawn = (_figure(assessment, source, where) for source, where in SOURCES.items())
    figures = [figure for figure in drawn if figure is not None]
    if not figures:
        return None
    return Section(
        "curves",
        "Training curves",
        figures=figures,
        tables=_lost(assessment),
        numbers={
            run.cell.id: {
                f"{source}/{metric}": float(curve.value[-1])
                for source in SOURCES
                for metric in METRICS
                if (curve := run.curves.get(f"{source}/{metric}")) is not None and len(curve.value)
            }
            for run in assessment.sweep.grid.values()
        },
    )


def _lost(assessment: Assessment) -> list[Table]:
    """The table of what carries no signal, by arm; none if no run records it."""

    def mean(arm: str, key: str) -> str:
        mine = [run for run in assessment.sweep.grid.values() if run.point.arm == arm]
        curves = [curve.value for run in mine if (curve := _curve(run, "train", key)) is not None]
        values = np.concatenate([np.empty(0), *curves])
        values = values[np.isfinite(values)]
        return _LOST[key][1](float(values.mean())) if len(values) else "–"

    rows = [(arm, *(mean(arm, key) for key in _LOST)) for arm in assessment.sweep.plan.grid.arms]
    caption = "What trains nothing or is incomplete: means over the training steps of all runs of an arm."
    found = any(text != "–" for _, *texts in rows for text in texts)
    return [Table(caption, ("Arm", *(name for name, _ in _LOST.values())), rows)] if found else []


def _figure(assessment: Assessment, source: str, where: str) -> Figure | None:
    runs = [
        run
        for run in assessment.sweep.grid.values()
        if any(_curve(run, source, metric) for metric in METRICS)
    ]
    if not runs:
        return None
    name = NAMES[source]
    return Figure(
        _draw(assessment, runs, source),
        f"{name} curves of reward and KL against the training step for {len(runs)} runs, one row per β.",
        f"{name}: reward and KL {where}. Thick lines are means of an arm over its replicates, at the steps "
        "at which all of them have a value, with pointwise 95% t intervals; pale lines are single runs. "
        "Curves are not smoothed. A line that ends early is of a run that diverged.",
        _table(assessment, runs, source),
    )


def _curve(run: Run, source: str, metric: str) -> Curve | None:
    curve = run.curves.get(f"{source}/{metric}")
    return curve if curve is not None and len(curve.step) else None


def _table(assessment: Assessment, runs: Sequence[Run], source: str) -> Table:
    rows = []
    for index, beta in assessment.sweep.plan.grid.beta.items():
        for name in assessment.sweep.plan.grid.arms:
            mine = [run for run in runs if run.point.beta_index == index and run.point.arm == name]
            for metric, label in METRICS.items():
                curves = [curve for run in mine if (curve := _curve(run, source, metric)) is not None]
                if curves:
                    first, last = np.transpose([curve.value[[0, -1]] for curve in curves])
                    means = float(first.mean()), float(last.mean())
                    sd = float(last.std(ddof=1)) if len(curves) > 1 else None
                    rows.append((name, f"{beta:g}", label, *means, sd, str(len(curves))))
    return Table(
        f"{NAMES[source]}: mean over replicates at the first and the last logged step, and the standard "
        "deviation (SD) between replicates at the last.",
        ("Arm", "β", "Metric", "First", "Last", "SD at last", "Runs"),
        rows,
    )


def _draw(assessment: Assessment, runs: Sequence[Run], source: str) -> str:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    with sheet(0.7 + 1.55 * len(plan.grid.beta)) as drawn:
        panels = drawn.canvas.subplots(
            len(plan.grid.beta), len(METRICS), sharex=True, sharey="col", squeeze=False
        )
        for row, (index, beta) in zip(panels, plan.grid.beta.items(), strict=True):
            for axes, (metric, label) in zip(row, METRICS.items(), strict=True):
                axes.set_title(f"β = {beta:g}: {label}", loc="left")
                for name, look in styles.items():
                    mine = [run for run in runs if run.point.beta_index == index and run.point.arm == name]
                    curves = [curve for run in mine if (curve := _curve(run, source, metric)) is not None]
                    _draw_arm(axes, curves, look, rasterized=len(runs) > MANY)
        for axes in panels[-1]:
            axes.set_xlabel("training step")
        drawn.legend(legend_lines(styles, lines=True), columns=2)
    return drawn.svg


def _draw_arm(axes: Axes, curves: Sequence[Curve], look: Look, *, rasterized: bool) -> None:
    if not curves:
        return
    # One line with gaps is drawn much faster than a line for each run
    thin = [_thinned(curve) for curve in curves]
    step, value = (
        np.concatenate([np.append(getattr(one, name), np.nan) for one in thin]) for name in ("step", "value")
    )
    pale: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.3, "rasterized": rasterized}
    axes.plot(step, value, color=look.colour, **pale)
    mean, half_width = mean_curve(curves)
    mean = _thinned(mean)
    axes.plot(mean.step, mean.value, linewidth=1.5, **look.line)
    if len(curves) > 1:
        half_width = _thinned(half_width)
        band = mean.value - half_width.value, mean.value + half_width.value
        axes.fill_between(mean.step, *band, color=look.colour, alpha=0.18, linewidth=0)


def _thinned(curve: Curve) -> Curve:
    every = slice(None, None, 1 + len(curve.step) // _POINTS)
    return Curve(curve.step[every], curve.value[every])


def mean_curve(curves: Sequence[Curve]) -> tuple[Curve, Curve]:
    """The mean of several curves and half the width of its pointwise 95% t interval.

    Returns:
        Mean and half-width at the steps where every curve has a finite value.
    """
    steps = functools.reduce(np.intersect1d, [curve.step[np.isfinite(curve.value)] for curve in curves])
    values = np.stack([curve.value[np.isin(curve.step, steps)] for curve in curves])
    error = values.std(axis=0, ddof=1) / math.sqrt(len(curves)) if len(curves) > 1 else np.zeros(len(steps))
    critical = float(stats.t.ppf(0.975, len(curves) - 1)) if len(curves) > 1 else 0.0
    return Curve(steps, values.mean(axis=0)), Curve(steps, critical * error)
