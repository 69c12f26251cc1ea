"""Fig. 1: reward against KL, every run."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import FAINT, INK, MANY, Look, legend_lines, looks, sheet
from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.frontier import nondominated
from analysis.stats.pairs import BoolArray, FloatArray
from analysis.stats.text import number
from lit_klrb import schema

NORMAL_95 = 1.959963984540054


def tradeoff(assessment: Assessment) -> Section | None:
    """All runs with the frontier, matched pairs joined, per-run evaluation intervals and landmarks."""
    runs = [run for run in assessment.sweep.grid.values() if not run.diverged]
    if not runs:
        return None
    on = _frontier(runs)
    table = Table(
        "Every run that did not diverge: final evaluation with its 95% interval over evaluation prompts.",
        ("Estimator", "β", "Replicate", "KL (nats)", "± 95%", "Reward", "± 95%", "On the frontier"),
        [_row(run, member) for run, member in zip(runs, on, strict=True)],
    )
    svg = _draw(assessment, runs, on)
    return Section(
        "tradeoff",
        "Reward against KL",
        paragraphs=[
            "Up is better (more reward), left is cheaper (closer to the reference). A run is on the frontier "
            "if no other run has at least its reward at no more KL, one of them strictly better."
        ],
        figures=[
            Figure(
                svg,
                f"Scatter plot of reward against KL for {len(runs)} runs of "
                f"{', '.join(assessment.sweep.plan.grid.arms)}; {int(on.sum())} are on the frontier.",
                "One mark is one run (one estimator, β and replicate). Grey lines join matched pairs: same "
                "β, same seed, other estimator. Crosses are 95% intervals of each run's evaluation, over "
                "prompts; they do not show the spread between replicates. The dashed steps are the frontier "
                "of all runs.",
                table,
            )
        ],
        numbers={
            "runs": {
                run.cell.id: {
                    "reward": run.outcome(schema.REWARD),
                    "kl": run.outcome(schema.KL),
                    "frontier": bool(member),
                }
                for run, member in zip(runs, on, strict=True)
            }
        },
    )


def _frontier(runs: list[Run]) -> BoolArray:
    kl = np.array([run.outcome(schema.KL) for run in runs])
    return nondominated(kl, np.array([run.outcome(schema.REWARD) for run in runs]))


def _row(run: Run, member: bool) -> tuple[str, ...]:
    point = run.point
    return (
        point.arm,
        f"{point.beta:g}",
        str(point.replicate),
        number(run.outcome(schema.KL)),
        number(NORMAL_95 * run.outcome(schema.KL_SE), 2),
        number(run.outcome(schema.REWARD)),
        number(NORMAL_95 * run.outcome(schema.REWARD_SE), 2),
        "yes" if member else "no",
    )


def _draw(assessment: Assessment, runs: list[Run], on: BoolArray) -> str:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    kl = np.array([run.outcome(schema.KL) for run in runs])
    reward = np.array([run.outcome(schema.REWARD) for run in runs])
    with sheet(4.2) as drawn:
        axes = drawn.canvas.subplots()
        for comparison in assessment.comparisons:
            joined = comparison.pairs.kl.T, comparison.pairs.reward.T
            axes.plot(*joined, color=FAINT, linewidth=0.7, zorder=1, rasterized=len(runs) > MANY)
        order = np.lexsort((reward[on], kl[on]))
        steps = (kl[on][order], reward[on][order])
        axes.step(*steps, where="post", color=INK, linestyle=(0, (2, 2)), linewidth=1, zorder=2)
        for name, look in styles.items():
            mine = np.array([run.point.arm == name for run in runs])
            members = [run for run in runs if run.point.arm == name]
            _draw_runs(axes, members, kl[mine], reward[mine], look, rasterized=len(runs) > MANY)
        marks = _draw_landmarks(axes, assessment.sweep)
        _label_betas(axes, runs, kl, reward)
        axes.set_xlabel("KL to the reference (nats per completion)")
        axes.set_ylabel("Mean reward")
        axes.margins(y=0.12)
        handles = [*legend_lines(styles, lines=False), *marks]
        drawn.canvas.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=8)
    return drawn.svg


def _draw_runs(
    axes: Axes, runs: list[Run], kl: FloatArray, reward: FloatArray, look: Look, *, rasterized: bool
) -> None:
    def halves(key: str) -> FloatArray:
        return NORMAL_95 * np.nan_to_num([run.outcome(key) for run in runs])

    axes.errorbar(
        kl,
        reward,
        xerr=halves(schema.KL_SE),
        yerr=halves(schema.REWARD_SE),
        fmt=look.marker,
        color=look.colour,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        elinewidth=0.7,
        ecolor=(look.colour, 0.4),
        zorder=3,
        rasterized=rasterized,
    )


def _label_betas(axes: Axes, runs: list[Run], kl: FloatArray, reward: FloatArray) -> None:
    for beta in sorted({run.point.beta for run in runs}):
        mine = np.array([run.point.beta == beta for run in runs])
        lowest = reward[mine] - NORMAL_95 * np.nan_to_num(
            [run.outcome(schema.REWARD_SE) for run in runs if run.point.beta == beta]
        )
        axes.annotate(
            f"β = {beta:g}",
            (float(np.median(kl[mine])), float(lowest.min())),
            xytext=(0, -5),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
        )


def _draw_landmarks(axes: Axes, sweep: Sweep) -> list[Line2D]:
    """Points outside the sweep; returns their legend entries."""
    marks = []
    for (name, kl, reward), marker in zip(landmarks(sweep), "*pHd", strict=False):
        axes.plot([kl], [reward], marker, color=INK, markersize=9, markerfacecolor="white", zorder=4)
        marks.append(
            Line2D([], [], color=INK, marker=marker, linestyle="none", markerfacecolor="white", label=name)
        )
    return marks


def landmarks(sweep: Sweep) -> list[tuple[str, float, float]]:
    """(name, KL, reward) of the reference and of each warm start, as far as they were evaluated.

    A warm start's training begins at the reference: its first evaluation, at KL 0, is the reference's.
    """
    found: list[tuple[str, float, float]] = []
    for run in sweep.landmarks:
        reward, kl = (run.curves.get(f"val/{key}") for key in (schema.REWARD, schema.KL))
        if reward and kl and len(kl.value) and len(reward.value) and abs(kl.value[0]) < 1e-6:
            found.insert(0, ("reference", 0.0, float(reward.value[0])))
        if math.isfinite(run.outcome(schema.KL)) and math.isfinite(run.outcome(schema.REWARD)):
            found.append(
                (f"after {run.cell.stage.upper()}", run.outcome(schema.KL), run.outcome(schema.REWARD))
            )
    return found
