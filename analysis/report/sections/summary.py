"""The verdict, with its counts, and the execution of the plan."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from analysis.report.assessment import GREW, Assessment, level_of
from analysis.report.elements import Section, Table
from analysis.report.matching import warm_starts
from analysis.report.power import warnings
from analysis.report.sections.outcomes import forests
from analysis.report.sections.runs import biased_arms, block_condition
from analysis.results.locked import Moment
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Verdict
from analysis.stats.contrast import TTest, kl_ratio
from analysis.stats.power import rejections
from analysis.stats.text import aligned, aligned_ends, count, decimals_of, number, whole_percent, with_ends

# The largest integer that JSON holds exactly.
_LARGEST = 2**53
# Number of problems that are shown beside a verdict.
_CAUTIONS = 3


def summary(assessment: Assessment) -> Section:
    """The verdict of each comparison, or the reason why there is none."""
    if assessment.withheld:
        return Section(
            "verdict",
            "No verdict",
            paragraphs=_why_not(assessment),
            figures=forests(assessment),
            numbers={"complete": not assessment.sweep.missing, "withheld": assessment.withheld},
        )
    comparisons = assessment.comparisons
    off = _off_normal(assessment)
    return Section(
        "verdict",
        "Verdict",
        figures=forests(assessment),
        tables=[_verdict_table(comparisons)],
        notes=[one.primary.sentence for one in comparisons],
        paragraphs=[
            *biased_arms(assessment.sweep),
            " ".join([_counts(assessment), *conditions(assessment)]),
            *filter(None, [one.primary.disagreement for one in comparisons]),
            *([_off_normal_text(off)] if off else []),
            *filter(None, [assessment.worst, _caution(assessment)]),
        ],
        numbers={
            "complete": True,
            "decisions": {c.pairs.treatment: c.primary.outcome.value for c in comparisons},
            "verdicts": {c.pairs.treatment: [verdict_numbers(v) for v in c.verdicts] for c in comparisons},
            "rejections": off,
        },
    )


def _off_normal(assessment: Assessment) -> dict[str, tuple[float, float]]:
    """How often the test says better, and worse, without a mean difference, by the kind of differences."""
    tests = [one.primary.test for one in assessment.comparisons]
    least = min(tests, key=lambda test: test.units)
    level = assessment.comparisons[0].primary.level
    return rejections(least.units, level, by_t=isinstance(least, TTest)) if least.units > 1 else {}


def _off_normal_text(rates: dict[str, tuple[float, float]]) -> str:
    normal, skewed = (whole_percent(sum(rates[name])) for name in ("normal", "log-normal"))
    return (
        f"False positives of this test in simulated sweeps: {normal} if differences are normal, {skewed} if "
        "they are log-normal. Where one run in ten collapses, and loses what the others gain, it says better "
        f"in {whole_percent(rates['collapses'][0])}, as few samples contain a collapse."
    )


def _why_not(assessment: Assessment) -> list[str]:
    sweep, waiting = assessment.sweep, len(assessment.sweep.missing)
    if sweep.invalid:
        return [
            "There is no verdict: the runs are not those of the plan, or cannot be compared. Until this is "
            "corrected, by running again what is named here or by a new plan that says it, no number on this "
            "page supports a conclusion.",
            *sweep.invalid,
        ]
    if waiting:
        return [
            f"There is no verdict: {waiting} of {len(sweep.plan.places)} planned runs have no result yet. "
            "This page shows the others; they must not decide when the sweep stops."
        ]
    if assessment.withheld == GREW:
        return [
            f"There is no verdict: {GREW}, so that no p-value of it holds. A new plan with the same arms, β "
            "and replicates can decide. It needs another root_seed and directory, so that none of these runs "
            f"is in it, and is locked before its first of {count(len(sweep.plan.places), 'run')}."
        ]
    return [f"There is no verdict: {assessment.withheld}."]


def verdict_numbers(verdict: Verdict) -> dict[str, Any]:
    """The numbers of a verdict, for `results.json`."""
    test, beside = verdict.test, verdict.beside
    return {
        "claim": verdict.claim.key,
        "outcome": verdict.outcome.value,
        "label": verdict.label,
        "estimate": verdict.estimate.value,
        "unit": verdict.unit,
        "interval": verdict.interval and verdict.interval.ends,
        "level": 1 - verdict.level,
        "p": test.p_value,
        "p_adjusted": verdict.adjusted,
        "p_adjusted_attainable": verdict.attainable,
        "p_of_other_test": beside and beside.p_value,
        "detectable": verdict.detectable,
        **(
            {"units": test.units, "over_blocks": test.over_blocks}
            if isinstance(test, TTest)
            else {"swaps": None if test.resamples > _LARGEST else test.resamples, "exact": test.exact}
        ),
        "replicates": verdict.replicates,
    }


def _verdict_table(comparisons: Sequence[Comparison]) -> Table:
    primary = comparisons[0].primary
    level = 1 - primary.level
    decimals = decimals_of(one.primary.estimate.value for one in comparisons)
    units = {one.primary.unit for one in comparisons}  # ranks if a run diverged
    unit = f" ({primary.unit})" if len(units) == 1 else ""
    gain = primary.gain
    gained = "unknown" if gain is None else with_ends(gain.value, gain.interval(level))
    other = "swaps" if isinstance(primary.test, TTest) else "t"
    prompts = any(one.primary.over_prompts for one in comparisons)

    def over_prompts(one: Comparison) -> str:
        both = one.primary.over_prompts
        return aligned_ends(None if both is None else both.interval(level), decimals)

    return Table.of(
        f"Difference in {primary.claim.subject}{unit} from {primary.control}, with simultaneous "
        f"{level_of(primary)} intervals and corrected p-values. What {primary.control} gained over the "
        f"start: {gained}.",
        comparisons,
        ("Arm", lambda one: one.pairs.treatment),
        ("Verdict", lambda one: one.primary.outcome.value),
        ("Difference", lambda one: aligned(one.primary.estimate.value, decimals, sign=True)),
        *((("Unit", lambda one: one.primary.unit),) if len(units) > 1 else ()),
        ("Over seeds", lambda one: aligned_ends(one.primary.interval, decimals)),
        *((("Over seeds and prompts", over_prompts),) if prompts else ()),
        (f"p ({'t' if other == 'swaps' else 'swaps'})", lambda one: number(one.primary.adjusted, 2)),
        (f"p ({other})", lambda one: _beside(one.primary)),
        ("KL ratio", lambda one: aligned(kl_ratio(one.pairs), 2)),
    )


def _beside(verdict: Verdict) -> str:
    """The corrected p-value of the other test."""
    return "–" if verdict.beside is None else number(min(1.0, verdict.beside.p_value * verdict.family), 2)


def _counts(assessment: Assessment) -> str:
    """The runs of a complete sweep."""
    grid = assessment.sweep.plan.grid
    diverged = sum(run.diverged for run in assessment.sweep.grid.values())
    return (
        f"{len(assessment.sweep.plan.places)} runs ({count(len(grid.arms), 'arm')} × {len(grid.beta)} β × "
        f"{count(grid.replicates, 'replicate')}); {diverged or 'none'} diverged."
    )


def _caution(assessment: Assessment) -> str:
    """The problems that do not rule out a verdict, and reasons to doubt that anything could be shown."""
    texts = [*warnings(assessment.sweep), *(problem.text for problem in assessment.sweep.problems)]
    more = f"; {len(texts) - _CAUTIONS} more under “Plan and execution”" if len(texts) > _CAUTIONS else ""
    return f"Caution: {'; '.join(texts[:_CAUTIONS])}{more}." if texts else ""


def conditions(assessment: Assessment) -> list[str]:
    """The conditions of all statements on the page."""
    texts = []
    if setting := assessment.sweep.plan.setting:
        texts.append(f"The setting: {setting} All statements apply to this setting only.")
    if warm_starts(assessment.sweep) == 1 and not any(c.primary.over_blocks for c in assessment.comparisons):
        start = "All runs share one warm start and one reference: all"
        if assessment.sweep.locked.origin is not None:
            start = "Where imported runs started is unknown. If from one warm start and one reference, all"
        texts.append(f"{start} statements are conditional on these, and do not apply to other checkpoints.")
    texts += filter(None, [block_condition(assessment)])
    if any(c.pairs.diverged.any() for c in assessment.comparisons):
        texts.append(
            "Some runs diverged. They rank last: differences are compared by rank within each β instead of "
            "by value, which a t test cannot."
        )
    return texts


def execution(assessment: Assessment) -> Section:
    """Counts of planned and finished runs, and all cells without an ordinary result."""
    sweep, locked = assessment.sweep, assessment.sweep.locked
    counts = {name: Counter[str]() for name in sweep.plan.grid.arms}
    for name, places in (("planned", sweep.plan.places), ("not run", sweep.missing)):
        for arm, _, _ in places:
            counts[arm][name] += 1
    for run in sweep.grid.values():
        counts.setdefault(run.point.arm, Counter())["diverged" if run.diverged else "finished"] += 1
    for failure in sweep.failures:
        point = failure.cell.point
        counts.setdefault(point.arm if point else failure.cell.stage, Counter())["failed"] += 1
    columns = ("planned", "finished", "diverged", "failed", "not run")
    text = f"Plan {sweep.plan.name}, locked with hash {locked.hash[:12]}"
    text += "." if locked.origin else f", {'; '.join(map(_when, locked.moments))}."
    if changes := [change for version in locked.history[1:] for change in version.changes]:
        seen = count(max(version.published for version in locked.history[1:]), "result")
        text += f" Changed after up to {seen} could have been seen: {'; '.join(changes)}."
    else:
        text += " It has not been changed since."
    problems = [problem.text for problem in sweep.problems]
    tables = [
        Table(
            "Runs per arm. A diverged run has a result, which ranks last; a failed run has none, for reasons "
            "other than divergence.",
            ("Arm", *columns),
            [(name, *(str(row[key]) for key in columns)) for name, row in counts.items()],
        ),
        Table("Cells without an ordinary result.", ("Cell", "State", "Reason"), _troubled(sweep)),
        Table("Problems of the files, and remarks on the runs.", ("Problem",), [(one,) for one in problems]),
    ]
    return Section(
        "execution",
        "Plan and execution",
        paragraphs=[text],
        tables=[table for table in tables if table.rows],
        numbers={"counts": {name: dict(row) for name, row in counts.items()}, "problems": problems},
    )


def _when(moment: Moment | None) -> str:
    """When a version of a plan was locked."""
    return "at a time that was not recorded" if moment is None else str(moment)


def _troubled(sweep: Sweep) -> list[tuple[str, str, str]]:
    why = "its training or final evaluation is not finite"
    rows = [(run.cell.title, "diverged", why) for run in sweep.runs if run.diverged]
    for failure in sweep.failures:
        last = (failure.error.strip().splitlines() or ["no message"])[-1][-200:]
        rows.append((failure.cell.title, "failed", f"{count(failure.attempts, 'attempt')}: {last}"))
    return rows + [(sweep.plan.title(place), "not run", "no result yet") for place in sweep.missing]
