"""Outcomes at equal time, beside those at equal steps, which all other sections compare."""

from collections.abc import Sequence

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results import Plan
from analysis.stats.equal_time import AtEqualTime, at_equal_time
from analysis.stats.text import number, percent, signed, with_ends


def equal_time(assessment: Assessment) -> Section | None:
    """A table of each arm at the time at which the quickest ends; None with times of fewer than two arms."""
    sweep = assessment.sweep
    found = at_equal_time(sweep)
    if not found:
        return None
    control, outcome = sweep.plan.primary.control, sweep.plan.primary.symbol
    return Section(
        "equal_time",
        "At equal time",
        paragraphs=[
            "Every arm at the time at which the quickest one ends, at the same β. The time of an arm is the "
            f"median over replicates of the time of its run relative to that of {control}; all steps of a "
            f"run are taken to last equally long. At the step that an arm has reached by then, its {outcome} "
            "is interpolated linearly between the validations of each run.",
            "Times are wall times of whole runs, including start and evaluations, on whatever the machine "
            "was doing. The schedules of the runs were for all of their steps: a shorter run can end with "
            "another value than a longer one passes. This comparison is descriptive; it is not the primary "
            "test, which is at equal steps.",
        ],
        tables=[_table(sweep.plan, found)],
        numbers={"arms": _numbers(found), "seconds": dict(sweep.seconds)},
        exploratory=True,
    )


def _table(plan: Plan, found: Sequence[AtEqualTime]) -> Table:
    control, outcome = plan.primary.control, plan.primary.symbol
    unit = "nats" if outcome == "KL" else "reward units"
    return Table.of(
        f"Time relative to {control}: median, and range over the given number of pairs of runs. {outcome} at "
        f"equal time ({unit}): mean over replicates, and mean matched difference to {control} at equal time "
        "with its 95% interval over replicates and their times, not corrected for multiple comparisons.",
        found,
        ("Arm", lambda each: each.label),
        ("β", lambda each: f"{plan.grid.beta[each.beta_index]:g}"),
        ("Time", lambda each: "1" if each.label == control else _time(each)),
        ("Pairs", lambda each: "–" if each.label == control else str(each.pairs)),
        ("Step", lambda each: number(each.step)),
        ("Share of steps", lambda each: percent(round(each.share, 2))),
        (outcome, lambda each: number(each.outcome.value) if each.outcome else "not evaluated in between"),
        ("Difference", lambda each: _difference(each)),
    )


def _difference(each: AtEqualTime) -> str:
    return with_ends(signed(each.difference.value), each.difference) if each.difference else "–"


def _time(each: AtEqualTime) -> str:
    low, high = each.range
    return f"{number(each.ratio)} ({number(low)} to {number(high)})"


def _numbers(found: Sequence[AtEqualTime]) -> dict[str, dict[str, object]]:
    numbers: dict[str, dict[str, object]] = {}
    for each in found:
        interval = each.difference and each.difference.interval()
        numbers.setdefault(each.label, {})[str(each.beta_index)] = {
            "time": each.ratio,
            "range": each.range,
            "pairs": each.pairs,
            "step": each.step,
            "outcome": each.outcome and each.outcome.value,
            "difference": each.difference and each.difference.value,
            "interval": interval and interval.ends,
        }
    return numbers
