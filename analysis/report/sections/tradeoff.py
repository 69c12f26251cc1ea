"""Fig. 1: reward against KL, means with intervals over single runs; and the results of each arm."""

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
from analysis.report.figures import FAINT, INK, Look, legend_lines, looks, sheet, thinned, thinning
from analysis.report.matching import arm_outcomes, compared, start_of
from analysis.results.records import OBJECTIVE, Run
from analysis.results.sweep import Sweep
from analysis.stats.frontier import nondominated
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import BoolArray, FloatArray
from analysis.stats.text import decimals_of, number, with_ends
from lit_klrb import schema

NORMAL_95 = 1.959963984540054


def tradeoff(assessment: Assessment) -> Section | None:
    """Means of each arm at each beta with intervals, single runs, frontier and landmarks."""
    runs = [run for run in assessment.sweep.grid.values() if not run.diverged]
    if not runs:
        return None
    points = np.array([(run.outcome(schema.KL), run.outcome(schema.REWARD)) for run in runs]).T
    on = nondominated(*points)
    alone = assessment.sweep.plan.primary.outcome == schema.KL
    void = "Not shown: this plan decides by the KL alone, as no arm was trained on a reward."
    return Section(
        "tradeoff",
        "Reward against KL",
        paragraphs=[void] if alone else (),
        figures=() if alone else [_figure(assessment, runs, points, on)],
        numbers={
            "runs": {
                run.cell.id: {"reward": reward, "kl": kl, "frontier": bool(member) and not alone}
                for run, kl, reward, member in zip(runs, *points.tolist(), on, strict=True)
            }
        },
    )


def _figure(assessment: Assessment, runs: list[Run], points: FloatArray, on: BoolArray) -> Figure:
    plan = assessment.sweep.plan
    joined = "lines join the betas of an arm; " if len(plan.grid.beta) > 1 else ""
    return Figure(
        lambda: _draw(assessment, runs, points, on),
        f"Reward against KL for {', '.join(plan.grid.arms)}: means over replicates at each "
        f"beta, and {len(runs)} single runs, {int(on.sum())} of them on the frontier.",
        "Up is more reward, left is closer to the reference. A large mark is the mean over the replicates of "
        f"an arm at one β, its bars are t intervals over replicates; {joined}long bars may end outside. Pale "
        "marks are single runs; the dashed steps are their frontier, the runs that no other run dominates "
        f"in reward and KL.{thinning(len(plan.grid.beta) * plan.grid.replicates)}",
        _table(runs, on),
    )


def _table(runs: list[Run], on: BoolArray) -> Table:
    return Table.of(
        "All runs that did not diverge: final evaluation with its 95% interval over evaluation prompts, from "
        "the values of each prompt; “–” without these, by which a recorded error could be checked.",
        zip(runs, on, strict=True),
        ("Arm", lambda row: row[0].point.arm),
        ("β", lambda row: f"{row[0].point.beta:g}"),
        ("Replicate", lambda row: str(row[0].point.replicate)),
        ("KL (nats)", lambda row: row[0].outcome(schema.KL)),
        ("± 95%", lambda row: NORMAL_95 * row[0].standard_error(schema.KL)),
        ("Reward", lambda row: row[0].outcome(schema.REWARD)),
        ("± 95%", lambda row: NORMAL_95 * row[0].standard_error(schema.REWARD)),
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
        level = 1 - plan.level
        _draw_runs(axes, runs, styles, level)
        marks = _draw_landmarks(axes, assessment.sweep)
        _label_betas(axes, runs, plan.primary.control)
        places = landmarks(assessment.sweep)
        _limit(axes.xaxis, np.array([*points[0], *(at for _, at, _ in places)]))
        _limit(axes.yaxis, np.array([*points[1], *(at for _, _, at in places)]))
        axes.set_xlabel("KL to the reference (nats per completion)")
        axes.set_ylabel("Mean reward")
        for index, beta in enumerate(betas):
            mine = [run for run in runs if run.point.beta == beta]
            panel = drawn.canvas.add_subplot(grid[1 + index // 3, index % 3])
            _draw_runs(panel, mine, styles, level)
            for axis, key in ((panel.xaxis, schema.KL), (panel.yaxis, schema.REWARD)):
                _limit(axis, np.array([run.outcome(key) for run in mine]))
            panel.set_title(f"β = {beta:g}", loc="left")
        drawn.legend([*legend_lines(styles, lines=False), *marks], columns=2)
    return drawn.svg


def _draw_runs(axes: Axes, runs: list[Run], styles: Mapping[str, Look], level: float) -> None:
    """Single runs, and the means of each arm at each beta."""
    for name, look in styles.items():
        mine = [run for run in runs if run.point.arm == name]
        if not mine:
            continue
        kl, reward = ([run.outcome(key) for run in thinned(mine)] for key in (schema.KL, schema.REWARD))
        pale: dict[str, Any] = {"color": look.colour, "alpha": 0.3, "markersize": 3.5, "zorder": 2}
        axes.plot(kl, reward, look.marker, markeredgewidth=0, **pale)
        _draw_means(axes, mine, look, level)


def _draw_means(axes: Axes, runs: list[Run], look: Look, level: float) -> None:
    """The means of one arm with their intervals, joined in the order of beta."""
    means = [[_mean(runs, beta, key) for beta in _betas(runs)] for key in (schema.KL, schema.REWARD)]
    bars = [
        [interval.high - one.value if (interval := one.interval(level)) else 0.0 for one in each]
        for each in means
    ]
    style: dict[str, Any] = {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.8}
    style |= {"marker": look.marker, "linewidth": 1.1, "elinewidth": 1.3, "zorder": 3, **look.line}
    kl, reward = ([one.value for one in each] for each in means)
    axes.errorbar(kl, reward, xerr=bars[0], yerr=bars[1], **style)


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
    points: dict[str, list[tuple[float, float]]] = {}
    for name, kl, reward in landmarks(sweep):
        points.setdefault(name, []).append((kl, reward))
    marks = []
    for (name, places), marker in zip(points.items(), cycle("*pHd"), strict=False):
        style: dict[str, Any] = {"color": INK, "marker": marker, "linestyle": "none"}
        style["markerfacecolor"] = "white"
        axes.plot(*np.transpose(places), markersize=9 if len(places) == 1 else 5, zorder=4, **style)
        marks.append(Line2D([], [], label=name, **style))
    return marks


def landmarks(sweep: Sweep) -> list[tuple[str, float, float]]:
    """(name, KL, reward) of the reference and of each warm start, as far as they were evaluated.

    A warm start's training begins at the reference: its first evaluation, at KL 0, is the reference's.
    Without a warm start, the evaluation of the runs of the grid before their first step is the start.
    """
    marks: list[tuple[str, float, float]] = []
    several = len({run.cell.stage for run in sweep.landmarks}) > 3  # such as one for each block
    for run in sweep.landmarks:
        reward, kl = (run.curves.get(f"val/{key}") for key in (schema.REWARD, schema.KL))
        if reward and kl and len(kl.value) and len(reward.value) and abs(kl.value[0]) < 1e-6:
            marks.insert(0, ("reference", 0.0, float(reward.value[0])))
        if math.isfinite(run.outcome(schema.KL)) and math.isfinite(run.outcome(schema.REWARD)):
            name = "warm starts" if several else f"after {run.cell.stage.upper()}"
            marks.append((name, run.outcome(schema.KL), run.outcome(schema.REWARD)))
    start = start_of(sweep)
    at_reward, at_kl = start[schema.REWARD], start[schema.KL]
    warm = any(name != "reference" for name, *_ in marks)
    if at_reward is not None and at_kl is not None and not warm:
        marks.append(("start", at_kl, at_reward))
    return marks


_NAMES = {
    schema.KL: "KL (nats)",
    schema.REWARD: "Reward",
    OBJECTIVE: "J = reward − β·KL",
    schema.LENGTH: "Length (tokens)",
}


def arm_results(assessment: Assessment) -> Section | None:
    """Means with intervals over replicates, and matched differences."""
    sweep = assessment.sweep
    # Arms at the same beta are next to each other, as these can be compared
    betas = list(sweep.plan.grid.beta.values())
    keys = [key for key in _NAMES if key in compared(sweep)]
    outcomes = sorted(arm_outcomes(sweep, keys), key=lambda outcome: betas.index(outcome.beta))
    if not any(outcome.n for outcome in outcomes):
        return None
    control, level = sweep.plan.primary.control, 1 - sweep.plan.level
    start = start_of(sweep)
    values = ", ".join(f"{_NAMES[key]} {number(start[key])}" for key in keys if start.get(key) is not None)
    decimals = {key: decimals_of(arm.means[key].value for arm in outcomes) for key in keys}
    names = [_NAMES[key] for key in keys]
    means = [
        (
            *(arm.label, f"{arm.beta:g}"),
            f"{arm.n} ({arm.diverged} diverged)" if arm.diverged else str(arm.n),
            *(with_ends(arm.means[key].value, arm.means[key].interval(level), decimals[key]) for key in keys),
        )
        for arm in outcomes
    ]
    differences = [
        (
            *(arm.label, f"{arm.beta:g}"),
            *(
                f"{with_ends(mean.value, mean.interval(level), decimals[key], sign=True)}; higher in "
                f"{arm.higher[key]} of {arm.pairs}"
                for key, mean in arm.differences.items()
            ),
        )
        for arm in outcomes
        if arm.label != control and arm.pairs
    ]
    of_means = (
        "Each arm at each β after training: mean with its t interval over replicates, without diverged runs."
    )
    of_differences = (
        f"Matched differences to {control} at each β: mean with its t interval over replicates, and the "
        "number of matched pairs in which the arm has the higher value."
    )
    tables = [
        Table(of_means, ("Arm", "β", "Runs", *names), means),
        Table(of_differences, ("Arm", "β", *names), differences),
    ]
    return Section(
        "happened",
        "Results of each arm",
        paragraphs=[f"At the start: {values}."] if values else (),
        tables=[table for table in tables if table.rows],
    )
