"""The verdict, with its counts."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from analysis.report.assessment import GREW, Assessment
from analysis.report.elements import Card, Conclusion, Section, Table
from analysis.report.sections.arms import biased_arms
from analysis.report.sections.blocks import block_condition
from analysis.report.sections.outcomes import forests
from analysis.results.sweep import Sweep
from analysis.stats import Comparison, Verdict
from analysis.stats.blocks import TTest
from analysis.stats.claims import FRONTIER_SHARE
from analysis.stats.kl_reward import kl_ratio
from analysis.stats.text import (
    aligned,
    aligned_ends,
    count,
    decimals_of,
    interval_text,
    number,
    percent,
    probability,
)
from analysis.stats.verdict import Outcome

_AGAINST = {
    Outcome.BETTER: "Better than {}",
    Outcome.WORSE: "Worse than {}",
    Outcome.EQUIVALENT: "Equivalent to {} within the planned margin",
    Outcome.INCONCLUSIVE: "Inconclusive against {}",
    Outcome.CANNOT_REJECT: "Not distinguishable from {} by this design",
    Outcome.NOT_TESTED: "Not tested against {}",
    Outcome.NO_VERDICT: "No verdict against {}",
}
# The largest integer that JSON holds exactly.
_LARGEST = 2**53
# Number of problems that are shown beside a verdict.
_CAUTIONS = 3


def summary(assessment: Assessment) -> Section:
    """One conclusion per comparison, or the reason why there is none."""
    if assessment.withheld:
        return Section(
            "verdict",
            "No verdict",
            paragraphs=_why_not(assessment),
            figures=forests(assessment),
            numbers={"complete": assessment.complete, "withheld": assessment.withheld},
        )
    comparisons = assessment.comparisons
    return Section(
        "verdict",
        "Verdict",
        conclusions=[_conclusion(comparisons[0])] if len(comparisons) == 1 else _by_outcome(comparisons),
        figures=forests(assessment),
        tables=[] if len(comparisons) == 1 else [_verdict_table(comparisons)],
        paragraphs=[
            *biased_arms(assessment.sweep),
            " ".join([_counts(assessment), *_conditions(assessment)]),
            *filter(None, [assessment.worst]),
            *_cautions(assessment),
        ],
        numbers={
            "complete": True,
            "decisions": {c.pairs.treatment: c.decision.outcome.value for c in comparisons},
            "verdicts": {c.pairs.treatment: [verdict_numbers(v) for v in c.verdicts] for c in comparisons},
        },
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
        return [f"There is no verdict: {GREW}, so that no p-value of it holds. {_what_would_decide(sweep)}"]
    return [f"There is no verdict: {assessment.withheld}."]


def _what_would_decide(sweep: Sweep) -> str:
    """What a new plan of the same cells would need."""
    runs = count(len(sweep.plan.places), "run")
    known = [sweep.seconds[run.cell.id] for run in sweep.grid.values() if run.cell.id in sweep.seconds]
    hours = f", {number(sum(known) / 3600, 2)} hours here one after another" if known else ""
    return (
        "A new plan with the same arms, β and replicates can decide. It needs another root_seed and "
        f"directory, so that none of these runs is in it, and is locked before its first of {runs}{hours}."
    )


def verdict_numbers(verdict: Verdict) -> dict[str, Any]:
    """The numbers of a verdict, for `results.json`."""
    share, test = verdict.share, verdict.test
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
        **(
            {"blocks": test.blocks}
            if isinstance(test, TTest)
            else {"swaps": None if test.resamples > _LARGEST else test.resamples, "exact": test.exact}
        ),
        "replicates": verdict.replicates,
        **({} if share is None else {"k": share.count, "n": share.total, "discordant": share.discordant}),
    }


def _by_outcome(comparisons: Sequence[Comparison]) -> list[Conclusion]:
    """One line per outcome with its arms; conclusive outcomes come first."""
    control = comparisons[0].pairs.control
    arms: dict[Outcome, list[str]] = {}
    decimals = decimals_of([one.decision.primary.estimate.value for one in comparisons])
    for comparison in sorted(comparisons, key=lambda one: -abs(one.decision.primary.estimate.value)):
        arms.setdefault(comparison.decision.outcome, []).append(_with_difference(comparison, decimals))
    return [
        Conclusion(outcome.value, f"{_AGAINST[outcome].format(control)}: {', '.join(arms[outcome])}.")
        for outcome in Outcome
        if outcome in arms
    ]


def _with_difference(comparison: Comparison, decimals: int) -> str:
    """An arm with its difference in the primary outcome, unless that is in ranks."""
    name, primary = comparison.pairs.treatment, comparison.decision.primary
    if comparison.pairs.diverged.any():
        return name
    outcome = "KL" if primary.claim.key == "kl" else "J"
    return f"{name} ({outcome} {aligned(primary.estimate.value, decimals, sign=True)})"


def _verdict_table(comparisons: Sequence[Comparison]) -> Table:
    primary = comparisons[0].decision.primary
    control, level = comparisons[0].pairs.control, percent(1 - primary.level)
    decimals = decimals_of(one.decision.primary.estimate.value for one in comparisons)
    matched = (
        () if primary.claim.key == "kl" else (("Reward at matched KL", partial(_at_matched_kl, decimals)),)
    )
    return Table.of(
        f"Each arm against {control}: difference in {primary.claim.subject} ({primary.unit}) with its "
        f"{level} interval, simultaneous over all arms, which excludes 0 if and only if p, corrected for as "
        f"many, is at most {primary.alpha:g}.",
        comparisons,
        ("Arm", lambda one: one.pairs.treatment),
        ("Verdict", lambda one: one.decision.outcome.value),
        ("Difference", lambda one: aligned(one.decision.primary.estimate.value, decimals, sign=True)),
        ("Interval", lambda one: aligned_ends(one.decision.primary.interval, decimals)),
        ("p", lambda one: aligned(one.decision.primary.adjusted, 3)),
        *matched,
        ("KL ratio", lambda one: aligned(kl_ratio(one.pairs), 2)),
    )


def _at_matched_kl(decimals: int, comparison: Comparison) -> str:
    comparable = comparison.fit is not None and not comparison.fit.refused
    return aligned(comparison.matched.estimate.value, decimals, sign=True) if comparable else "–"


def sentences(comparison: Comparison) -> list[str]:
    """The sentences of the verdicts behind the conclusion."""
    verdicts = (comparison.decision.primary, comparison.matched, comparison.of(FRONTIER_SHARE.key))
    return [verdict.sentence for verdict in verdicts if verdict is not None]


def _conclusion(comparison: Comparison) -> Conclusion:
    decision, void = comparison.decision, comparison.fit is None
    return Conclusion(
        decision.outcome.value,
        decision.headline,
        [
            _card(f"Difference in {'the KL' if void else 'J'}", decision.primary),
            *([] if void else [_card("Difference in reward at matched KL", comparison.matched)]),
        ],
        sentences(comparison),
    )


def _card(name: str, verdict: Verdict) -> Card:
    if math.isnan(verdict.estimate.value):
        return Card(name, "–", verdict.untested)
    how = (verdict.untested and "not tested") or probability(verdict.adjusted)
    value, interval = verdict.estimate.value, verdict.interval
    decimals = decimals_of([value, *(interval.ends if interval else ())])
    detail = f"{verdict.unit}; {interval_text(interval, decimals)}; {how}"
    return Card(name, aligned(value, decimals, sign=True), detail)


def _counts(assessment: Assessment) -> str:
    plan, grid = assessment.sweep.plan, assessment.sweep.grid
    diverged = sum(run.diverged for run in grid.values())
    return (
        f"{count(len(plan.grid.arms), 'arm')} × {count(len(plan.grid.beta), 'value')} of β × "
        f"{count(plan.grid.replicates, 'replicate')} = {len(plan.places)} runs, {len(grid)} with a result, "
        f"{diverged} of them diverged."
    )


def _cautions(assessment: Assessment) -> list[str]:
    """The problems that do not rule out a verdict."""
    texts = [problem.text for problem in assessment.sweep.problems]
    if not texts:
        return []
    more = f"; {len(texts) - _CAUTIONS} more under “Plan and execution”" if len(texts) > _CAUTIONS else ""
    return [f"Caution: {'; '.join(texts[:_CAUTIONS])}{more}."]


def _conditions(assessment: Assessment) -> list[str]:
    """The conditions of all statements on the page."""
    texts = []
    if assessment.sweep.plan.setting:
        texts.append(
            f"The setting: {assessment.sweep.plan.setting} All statements apply to this setting only."
        )
    if assessment.sweep.warm_starts == 1 and not any(
        c.decision.primary.over_blocks for c in assessment.comparisons
    ):
        texts.append(
            "All runs share one warm start and one reference: all statements are conditional on these, and "
            "do not apply to other checkpoints."
        )
    texts += filter(None, [block_condition(assessment)])
    if any(c.pairs.diverged.any() for c in assessment.comparisons):
        texts.append(
            "Some runs diverged. They rank last: differences are compared by rank within each β instead of "
            "by value, which a t test over blocks cannot, and there is no comparison at matched KL."
        )
    return texts
