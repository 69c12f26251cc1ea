"""Differences during training, and how early each arm reaches what the control ends with."""

from collections.abc import Mapping

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import legend_lines, looks, sheet
from analysis.results import Plan
from analysis.stats.intervals import Estimate
from analysis.stats.matching import matched_progress
from analysis.stats.pairs import Curves
from analysis.stats.progress import differences, reached
from analysis.stats.text import count, ends_text, number, percent, signed


def progress(assessment: Assessment) -> Section | None:
    """A figure and a table; None without an evaluation between the start and the end of training."""
    found = {c.pairs.treatment: matched_progress(assessment.sweep, c.pairs) for c in assessment.comparisons}
    known = {name: evaluations for name, evaluations in found.items() if evaluations is not None}
    if not known:
        return None
    plan = assessment.sweep.plan
    stages = {name: dict(zip(each.steps, differences(each), strict=True)) for name, each in known.items()}
    steps = {
        name: {int(index): reached(each, int(index)) for index in each.pairs.beta_indices}
        for name, each in known.items()
    }
    control, outcome = plan.primary.control, plan.primary.symbol
    return Section(
        "progress",
        "During training",
        paragraphs=[
            f"Differences in {outcome} at the common evaluations during training, and the step at which an "
            f"arm's mean {outcome} is as good as that with which {control} ends. Learning rates follow the "
            "schedule of the whole run: a shorter run can end with another value than this one passes."
        ],
        figures=[_differences(plan, known, stages)],
        tables=[_step_table(plan, known, steps)],
        numbers={
            name: {
                "differences": {f"{step:g}": each.value for step, each in stages[name].items()},
                "reached": {str(i): None if step is None else step.value for i, step in steps[name].items()},
            }
            for name in known
        },
        exploratory=True,
    )


def _differences(
    plan: Plan, known: Mapping[str, Curves], stages: Mapping[str, Mapping[float, Estimate]]
) -> Figure:
    control, outcome = plan.primary.control, plan.primary.symbol
    unit = "nats" if outcome == "KL" else "reward units"
    return Figure(
        _draw(plan, stages, f"{outcome} − {outcome} of {control}\n({unit})"),
        f"Difference in {outcome} to {control} against the training step for {count(len(known), 'arm')}.",
        f"Mean over β of each β's mean difference in {outcome}, with pointwise 95% intervals. At step 0, "
        "all arms are the same policy.",
        Table(
            f"Difference in {outcome} to {control} ({unit}), with its 95% interval.",
            ("Arm", "Step", "Share of steps", "Difference", "95% interval"),
            [
                (
                    name,
                    f"{step:g}",
                    _share(step, known[name]),
                    signed(each.value),
                    ends_text(each.interval()),
                )
                for name, rows in stages.items()
                for step, each in rows.items()
            ],
        ),
    )


def _draw(plan: Plan, stages: Mapping[str, Mapping[float, Estimate]], label: str) -> str:
    styles = looks(plan.grid.arms, plan.primary.control)
    with sheet(2.9) as drawn:
        axes = drawn.canvas.subplots()
        axes.axhline(0, color=styles[plan.primary.control].colour, linewidth=1.2)
        for name, rows in stages.items():
            look, steps = styles[name], list(rows)
            means = [each.value for each in rows.values()]
            axes.plot(steps, means, marker=look.marker, markersize=4, **look.line)
            intervals = [each.interval() for each in rows.values()]
            if all(intervals):
                ends = [each.ends for each in intervals if each is not None]
                axes.fill_between(steps, *np.transpose(ends), color=look.colour, alpha=0.18, linewidth=0)
        axes.set_xlabel("training step")
        axes.set_ylabel(label)
        drawn.legend(legend_lines(styles, lines=True), columns=3)
    return drawn.svg


def _step_table(
    plan: Plan, known: Mapping[str, Curves], steps: Mapping[str, Mapping[int, Estimate | None]]
) -> Table:
    return Table(
        f"Step at which the arm's mean {plan.primary.symbol} is as good as that with which "
        f"{plan.primary.control} ends, interpolated between evaluations, ± jackknife standard error over "
        "replicates.",
        ("Arm", "β", "Step", "Share of steps"),
        [
            (name, f"{plan.grid.beta[index]:g}", *_step(step, known[name]))
            for name, rows in steps.items()
            for index, step in rows.items()
        ],
    )


def _share(step: float, evaluations: Curves) -> str:
    """Share of the run; the last evaluation is at its end."""
    return percent(round(step / float(evaluations.steps[-1]), 2))


def _step(step: Estimate | None, evaluations: Curves) -> tuple[str, str]:
    if step is None:
        return "not reached", "–"
    error = f" ± {number(step.standard_error, 2)}" if step.degrees > 0 else ""
    return f"{number(step.value)}{error}", _share(step.value, evaluations)
