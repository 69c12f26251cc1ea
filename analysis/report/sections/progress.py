"""Differences during training, and how early each arm reaches what the control ends with."""

from collections.abc import Mapping

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results import Plan
from analysis.stats.intervals import Estimate
from analysis.stats.matching import matched_progress
from analysis.stats.progress import Evaluations, differences, reached
from analysis.stats.text import number, percent, signed


def progress(assessment: Assessment) -> Section | None:
    """Two tables; None without an evaluation between the start and the end of training."""
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
    control, outcome = plan.primary.control, _outcome(plan)
    return Section(
        "progress",
        "During training",
        paragraphs=[
            f"Differences in {outcome} at the common evaluations during training, and the step at which an "
            f"arm's mean {outcome} is as good as that with which {control} ends. Learning rates follow the "
            "schedule of the whole run: a shorter run can end with another value than this one passes."
        ],
        tables=[_difference_table(plan, known, stages), _step_table(plan, known, steps)],
        numbers={
            name: {
                "differences": {f"{step:g}": each.value for step, each in stages[name].items()},
                "reached": {str(i): None if step is None else step.value for i, step in steps[name].items()},
            }
            for name in known
        },
        exploratory=True,
    )


def _outcome(plan: Plan) -> str:
    return "KL" if plan.primary.outcome == "kl" else "J"


def _difference_table(
    plan: Plan, known: Mapping[str, Evaluations], stages: Mapping[str, Mapping[float, Estimate]]
) -> Table:
    unit = next(iter(known.values())).unit
    return Table(
        f"Difference in {_outcome(plan)} to {plan.primary.control} ({unit}), the mean over β of each β's "
        "mean, with its 95% interval.",
        ("Arm", "Step", "Share of steps", "Difference", "95% interval"),
        [
            (name, f"{step:g}", _share(step, known[name]), signed(each.value), _ends(each))
            for name, rows in stages.items()
            for step, each in rows.items()
        ],
    )


def _step_table(
    plan: Plan, known: Mapping[str, Evaluations], steps: Mapping[str, Mapping[int, Estimate | None]]
) -> Table:
    return Table(
        f"Step at which the arm's mean {_outcome(plan)} is as good as that with which {plan.primary.control} "
        "ends, interpolated between evaluations, ± jackknife standard error over replicates.",
        ("Arm", "β", "Step", "Share of steps"),
        [
            (name, f"{plan.grid.beta[index]:g}", *_step(step, known[name]))
            for name, rows in steps.items()
            for index, step in rows.items()
        ],
    )


def _share(step: float, evaluations: Evaluations) -> str:
    """Share of the run; the last evaluation is at its end."""
    return percent(round(step / float(evaluations.steps[-1]), 2))


def _ends(estimate: Estimate) -> str:
    interval = estimate.interval()
    return "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}"


def _step(step: Estimate | None, evaluations: Evaluations) -> tuple[str, str]:
    if step is None:
        return "not reached", "–"
    error = f" ± {number(step.standard_error, 2)}" if step.degrees > 0 else ""
    return f"{number(step.value)}{error}", _share(step.value, evaluations)
