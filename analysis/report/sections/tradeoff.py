"""Fig. 1: reward against KL, means with intervals over single runs."""

import math
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import FAINT, INK, MANY, Look, legend_lines, looks, sheet
from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.arms import start_of
from analysis.stats.frontier import nondominated
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import BoolArray, FloatArray
from lit_klrb import schema

NORMAL_95 = 1.959963984540054


def tradeoff(assessment: Assessment) -> Section | None:
    """Means of each arm at each beta with intervals, single runs, frontier and landmarks."""
    runs = [run for run in assessment.sweep.grid.values() if not run.diverged]
    if not runs:
        return None
    points = np.array([(run.outcome(schema.KL), run.outcome(schema.REWARD)) for run in runs]).T
    on = nondominated(*points)
    names = assessment.sweep.plan.grid.arms
    if assessment.sweep.plan.primary.outcome == schema.KL:
        return Section(
            "tradeoff",
            "Reward against KL",
            paragraphs=["Not shown: this plan decides by the KL alone, as no arm was trained on a reward."],
            numbers={"runs": {run.cell.id: _numbers(run, False) for run in runs}},
        )
    return Section(
        "tradeoff",
        "Reward against KL",
        figures=[
            Figure(
                _draw(assessment, runs, points, on),
                f"Reward against KL for {', '.join(names)}: means over replicates at each beta, and "
                f"{len(runs)} single runs, {int(on.sum())} of them on the frontier.",
                "Up is more reward, left is closer to the reference. A large mark is the mean over the "
                "replicates of an arm at one β, its bars are 95% t intervals over replicates, lines join the "
                "betas of an arm; long bars may end outside. Pale marks are single runs; the dashed steps "
                "are their frontier, the runs that no other run dominates in reward and KL.",
                _table(runs, on),
            )
        ],
        numbers={
            "runs": {run.cell.id: _numbers(run, bool(member)) for run, member in zip(runs, on, strict=True)}
        },
    )


def _numbers(run: Run, member: bool) -> dict[str, Any]:
    return {"reward": run.outcome(schema.REWARD), "kl": run.outcome(schema.KL), "frontier": member}


def _table(runs: list[Run], on: BoolArray) -> Table:
    return Table.of(
        "All runs that did not diverge: final evaluation with its 95% interval over evaluation prompts.",
        zip(runs, on, strict=True),
        ("Arm", lambda row: row[0].point.arm),
        ("β", lambda row: f"{row[0].point.beta:g}"),
        ("Replicate", lambda row: str(row[0].point.replicate)),
        ("KL (nats)", lambda row: row[0].outcome(schema.KL)),
        ("± 95%", lambda row: NORMAL_95 * row[0].outcome(schema.KL_SE)),
        ("Reward", lambda row: row[0].outcome(schema.REWARD)),
        ("± 95%", lambda row: NORMAL_95 * row[0].outcome(schema.REWARD_SE)),
        ("On the frontier", lambda row: "yes" if row[1] else "no"),
    )


def _draw(assessment: Assessment, runs: list[Run], points: FloatArray, on: BoolArray) -> str:
    """All runs in one panel, and one for each β, in which arms that end alike do not hide each other."""
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    betas = _betas(runs) if len(plan.grid.beta) > 1 else []
    rows = -(-len(betas) // 3)
    with sheet(4.2 + 1.7 * rows) as drawn:
        grid = drawn.canvas.add_gridspec(1 + rows, 3, height_ratios=[2.6, *[1.0] * rows])
        axes = drawn.canvas.add_subplot(grid[0, :])
        order = np.lexsort((points[1][on], points[0][on]))
        steps = (points[0][on][order], points[1][on][order])
        axes.step(*steps, where="post", color=FAINT, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        _draw_runs(axes, runs, styles)
        marks = _draw_landmarks(axes, assessment.sweep)
        _label_betas(axes, runs, plan.primary.control)
        places = landmarks(assessment.sweep)
        _limit(axes.xaxis, np.array([*points[0], *(at for _, at, _ in places)]))
        _limit(axes.yaxis, np.array([*points[1], *(at for _, _, at in places)]))
        axes.set_xlabel("KL to the reference (nats per completion)")
        axes.set_ylabel("Mean reward")
        for place, beta in enumerate(betas):
            mine = [run for run in runs if run.point.beta == beta]
            panel = drawn.canvas.add_subplot(grid[1 + place // 3, place % 3])
            _draw_runs(panel, mine, styles)
            for axis, key in ((panel.xaxis, schema.KL), (panel.yaxis, schema.REWARD)):
                _limit(axis, np.array([run.outcome(key) for run in mine]))
            panel.set_title(f"β = {beta:g}", loc="left")
        drawn.legend([*legend_lines(styles, lines=False), *marks], columns=2)
    return drawn.svg


def _draw_runs(axes: Axes, runs: list[Run], styles: Mapping[str, Look]) -> None:
    """Single runs, and the means of each arm at each beta."""
    for name, look in styles.items():
        mine = [run for run in runs if run.point.arm == name]
        if not mine:
            continue
        kl, reward = ([run.outcome(key) for run in mine] for key in (schema.KL, schema.REWARD))
        pale: dict[str, Any] = {"color": look.colour, "alpha": 0.3, "markersize": 3.5, "zorder": 2}
        axes.plot(kl, reward, look.marker, markeredgewidth=0, rasterized=len(runs) > MANY, **pale)
        _draw_means(axes, mine, look)


def _draw_means(axes: Axes, runs: list[Run], look: Look) -> None:
    """The means of one arm, joined in the order of beta."""
    points = [[_mean(runs, beta, key) for key in (schema.KL, schema.REWARD)] for beta in _betas(runs)]
    kl, reward = ([point[index] for point in points] for index in (0, 1))
    axes.errorbar(
        [mean.value for mean in kl],
        [mean.value for mean in reward],
        xerr=[_half_width(mean) for mean in kl],
        yerr=[_half_width(mean) for mean in reward],
        marker=look.marker,
        linestyle=look.dashes,
        color=look.colour,
        linewidth=1.1,
        markersize=7,
        markeredgecolor="white",
        markeredgewidth=0.8,
        elinewidth=1.3,
        zorder=3,
    )


def _limit(axis: Axis, points: FloatArray) -> None:
    """Limit an axis to its points and what is near them, as an interval over few replicates may be huge."""
    low, high = float(points.min()), float(points.max())
    near = 0.3 * (high - low)
    shown = axis.get_view_interval()
    if near > 0:
        axis.set_view_interval(max(shown[0], low - near), min(shown[1], high + near), ignore=True)


def _betas(runs: list[Run]) -> list[float]:
    return sorted({run.point.beta for run in runs})


def _mean(runs: list[Run], beta: float, key: str) -> Estimate:
    return Estimate.of_mean(np.array([run.outcome(key) for run in runs if run.point.beta == beta]))


def _half_width(mean: Estimate) -> float:
    interval = mean.interval()
    return 0.0 if interval is None else interval.high - mean.value


def _label_betas(axes: Axes, runs: list[Run], control: str) -> None:
    """The betas, each above and left of the control's mean, where better runs would be."""
    mine = [run for run in runs if run.point.arm == control] or runs
    for beta in _betas(mine):
        axes.annotate(
            f"β = {beta:g}",
            (_mean(mine, beta, schema.KL).value, _mean(mine, beta, schema.REWARD).value),
            xytext=(-7, 7),
            textcoords="offset points",
            ha="right",
            va="bottom",
            bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.7},
            zorder=5,
        )


def _draw_landmarks(axes: Axes, sweep: Sweep) -> list[Line2D]:
    """Points outside the sweep; returns their legend entries."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, kl, reward in landmarks(sweep):
        found.setdefault(name, []).append((kl, reward))
    marks = []
    for (name, places), marker in zip(found.items(), cycle("*pHd"), strict=False):
        style: dict[str, Any] = {
            "color": INK,
            "marker": marker,
            "linestyle": "none",
            "markerfacecolor": "white",
        }
        axes.plot(*np.transpose(places), markersize=9 if len(places) == 1 else 5, zorder=4, **style)
        marks.append(Line2D([], [], label=name, **style))
    return marks


def landmarks(sweep: Sweep) -> list[tuple[str, float, float]]:
    """(name, KL, reward) of the reference and of each warm start, as far as they were evaluated.

    A warm start's training begins at the reference: its first evaluation, at KL 0, is the reference's.
    Without a warm start, the evaluation of the runs of the grid before their first step is the start.
    """
    found: list[tuple[str, float, float]] = []
    several = len({run.cell.stage for run in sweep.landmarks}) > 3  # such as one for each block
    for run in sweep.landmarks:
        reward, kl = (run.curves.get(f"val/{key}") for key in (schema.REWARD, schema.KL))
        if reward and kl and len(kl.value) and len(reward.value) and abs(kl.value[0]) < 1e-6:
            found.insert(0, ("reference", 0.0, float(reward.value[0])))
        if math.isfinite(run.outcome(schema.KL)) and math.isfinite(run.outcome(schema.REWARD)):
            name = "warm starts" if several else f"after {run.cell.stage.upper()}"
            found.append((name, run.outcome(schema.KL), run.outcome(schema.REWARD)))
    start = start_of(sweep)
    at_reward, at_kl = start[schema.REWARD], start[schema.KL]
    warm = any(name != "reference" for name, *_ in found)
    if at_reward is not None and at_kl is not None and not warm:
        found.append(("start", at_kl, at_reward))
    return found
