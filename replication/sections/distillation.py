"""On-policy distillation of enumerated models: the map of which credit for the KL wins where."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, Look, legend_lines, looks, sheet
from analysis.stats.text import interval_text, number
from replication import schema
from replication.artifacts import (
    DistillationArtifact,
    DistillationCell,
    first_artifact,
    read_distillation,
)
from replication.distilled import DistilledArm, distilled_arms, regret

CONTROL = "whole future, exact"


def distillation(assessment: Assessment) -> Section | None:
    """Final KL of every arm at each point of the map, from the artifact of `DistillationStudy`."""
    artifact = first_artifact(assessment.sweep, schema.DISTILLATION, read_distillation)
    if artifact is None:
        return None
    control = CONTROL if CONTROL in artifact.finals else next(iter(artifact.finals))
    arms = distilled_arms(artifact, control)
    regrets = regret(arms)
    # Best arm first, without the control and the exact gradient
    compared = {arm: arms[arm] for arm in sorted(regrets, key=regrets.__getitem__) if arm != control}
    runs = artifact.start.shape[1] - artifact.selection
    rates = ", ".join(f"{rate:g}" for rate in artifact.learning_rates)
    return Section(
        "distillation",
        "On-policy distillation, enumerated",
        paragraphs=[
            f"Exact KL(student‖teacher) after {artifact.steps} Adam steps, of {runs} runs with random "
            f"teachers and students (n counts runs). Each arm is at its own best rate of {rates}, chosen on "
            f"{artifact.selection} other runs. A student of limited capacity cannot match its teacher.",
        ],
        figures=[_figure(artifact, compared, control)],
        tables=[_means(artifact, arms, regrets)],
        numbers={arm: _numbers(one, regrets.get(arm)) for arm, one in arms.items()},
        exploratory=True,
    )


def _means(
    artifact: DistillationArtifact, arms: dict[str, list[DistilledArm]], regrets: dict[str, float]
) -> Table:
    ordered = sorted(arms, key=lambda arm: regrets.get(arm, 0.0))
    rows = [("start", *(number(float(kl.mean())) for kl in artifact.start), "–")]
    for arm in ordered:
        rows.append((arm, *map(_mean, arms[arm]), number(regrets[arm]) if arm in regrets else "–"))
    return Table(
        "Final KL in nats per completion, mean over runs ± standard error. * the best rate is the smallest "
        "or largest tried. Worst ratio: the largest ratio, over the columns, of the geometric mean KL to "
        "that of the column's best arm; the arm with the smallest comes first.",
        ("Arm", *map(str, artifact.cells), "Worst ratio"),
        rows,
    )


def _mean(arm: DistilledArm) -> str:
    mean = f"{number(arm.mean.value)} ± {number(arm.mean.standard_error, 2)}"
    return f"{mean}*" if arm.at_edge else mean


def _figure(
    artifact: DistillationArtifact, compared: Mapping[str, Sequence[DistilledArm]], control: str
) -> Figure:
    return Figure(
        lambda: _draw(artifact, compared, control),
        f"Forest plot of the final KL of each arm relative to “{control}”, at each point of the map, with "
        "one panel per capacity of the student.",
        f"Left of 1 an arm ends nearer to the teacher than “{control}”. Geometric mean over runs (n counts "
        "runs) with its t interval, simultaneous over the map; logarithmic axis. Each arm is at its "
        "own best rate. The arm with the smallest worst ratio comes first.",
        Table(
            f"KL over that of “{control}”: geometric mean over runs with a t interval. p of paired "
            "t-tests of its log; both are corrected over the whole table.",
            ("Arm", *map(str, artifact.cells)),
            [(arm, *map(_ratio, found)) for arm, found in compared.items()],
        ),
    )


def _ratio(arm: DistilledArm) -> str:
    interval = interval_text(arm.interval and arm.interval.exp())
    return f"{number(float(np.exp(arm.log_ratio.value)))} ({interval}, p = {number(arm.p_adjusted, 2)})"


def _problem(cell: DistillationCell) -> str:
    return f"distance {cell.distance:g}, batch {cell.batch}"


def _draw(
    artifact: DistillationArtifact, compared: Mapping[str, Sequence[DistilledArm]], control: str
) -> str:
    capacities = list(dict.fromkeys(cell.capacity for cell in artifact.cells))
    problems = list(dict.fromkeys(map(_problem, artifact.cells)))
    styles = looks(problems, problems[0])
    width = 0.11 * (len(problems) - 1)  # of an arm's row, in inches
    spread = dict(zip(problems, np.linspace(-0.5, 0.5, len(problems)) * width / (width + 0.2), strict=True))
    with sheet(1.2 + (width + 0.2) * len(compared)) as drawn:
        panels = drawn.canvas.subplots(1, len(capacities), sharey=True, squeeze=False)[0]
        for axes, capacity in zip(panels, capacities, strict=True):
            for row, found in enumerate(compared.values()):
                for cell, arm in zip(artifact.cells, found, strict=True):
                    if cell.capacity == capacity:
                        name = _problem(cell)
                        _draw_ratio(axes, row + spread[name], arm, styles[name])
            axes.axvline(1, color=INK, linewidth=0.8)
            axes.set_title(f"{capacity} capacity", loc="left", fontsize=8)
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(compared)), compared, fontsize=8)
        axes.invert_yaxis()
        drawn.canvas.supxlabel(f"KL relative to “{control}” (log scale)", fontsize=9)
        handles = legend_lines(styles, lines=False)
        drawn.canvas.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=8)
    return drawn.svg


def _draw_ratio(axes: Axes, row: float, arm: DistilledArm, look: Look) -> None:
    interval = arm.interval
    if interval is not None:
        axes.plot(np.exp([interval.low, interval.high]), [row, row], color=look.colour, linewidth=1.2)
    axes.plot([np.exp(arm.log_ratio.value)], [row], look.marker, color=look.colour, markersize=4)


def _numbers(found: list[DistilledArm], worst: float | None) -> dict[str, Any]:
    return {
        "rates": [one.rate for one in found],
        "kl": [one.mean.value for one in found],
        "standard_error": [one.mean.standard_error for one in found],
        "log_ratio": [one.log_ratio.value for one in found],
        "p_adjusted": [one.p_adjusted for one in found],
        "worst_ratio": worst,
    }
