"""The verdict, with the counts it rests on."""

import math
from collections.abc import Sequence
from typing import Any

from analysis.report.assessment import Assessment
from analysis.report.elements import Card, Finding, Section, Table
from analysis.report.sections.arms import biased_arms
from analysis.stats import Comparison, Decision, Verdict
from analysis.stats.kl_reward import kl_ratio
from analysis.stats.text import (
    count,
    interval_text,
    number,
    percent,
    probability,
    share_interval_text,
    signed,
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
GLOSSARY = (
    ("KL", "how far a trained policy has moved from its reference, in nats per completion"),
    ("β", "the price of a nat: each run maximises J = reward − β·KL at its own β"),
    (
        "Estimator",
        "how the gradient of the KL is estimated in training; all runs are scored by one common evaluator "
        "instead, on the same prompts and seeds",
    ),
    ("Matched pair", "two runs with the same β, replicate and seed that differ in the estimator only"),
    ("Reward at matched KL", "what one estimator's runs earn more than the other's at the same KL"),
    (
        "Simultaneous interval",
        "at the level of the first step of Holm's correction: all intervals of a family hold together",
    ),
    ("Replicate", "one repetition of the whole grid with its own seeds; n counts these"),
    (
        "Swap p-value",
        "how often a difference as large appears if the estimators' names are exchanged at random within the "
        "matched pairs",
    ),
)


def summary(assessment: Assessment) -> Section:
    """One finding for each comparison, or why there is none."""
    if assessment.withheld:
        return Section(
            "verdict",
            "No verdict",
            paragraphs=_why_not(assessment),
            glossary=GLOSSARY,
            numbers={"complete": assessment.complete, "withheld": assessment.withheld},
        )
    comparisons = assessment.comparisons
    return Section(
        "verdict",
        "What this sweep says",
        findings=[_finding(comparisons[0])] if len(comparisons) == 1 else _by_outcome(comparisons),
        tables=[] if len(comparisons) == 1 else [_verdict_table(comparisons)],
        paragraphs=[
            *biased_arms(assessment.sweep),
            " ".join([_counts(assessment), *_conditions(assessment)]),
        ],
        notes=[
            *(sentence for one in comparisons for sentence in _sentences(one) if len(comparisons) > 1),
            _inference(assessment),
        ],
        glossary=GLOSSARY,
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
            "There is no verdict: what is in the directory is not what the plan says. Until it is put "
            "right no number of this page supports a conclusion.",
            *sweep.invalid,
        ]
    if waiting:
        return [
            f"There is no verdict: {waiting} of {len(sweep.plan.places)} planned runs have no result yet. "
            f"What follows shows what is there; {_looking(assessment)}"
        ]
    return [f"There is no verdict: {assessment.withheld}."]


def _looking(assessment: Assessment) -> str:
    if assessment.sweep.plan.primary.sequential:
        return "the evidence pair by pair is valid at any look, nothing else here is."
    return "looking at it must not decide when the sweep stops."


def verdict_numbers(verdict: Verdict) -> dict[str, Any]:
    """Everything a verdict says, for `results.json`."""
    interval, share = verdict.interval, verdict.share
    return {
        "claim": verdict.claim.key,
        "outcome": verdict.outcome.value,
        "label": verdict.label,
        "estimate": verdict.estimate.value,
        "unit": verdict.unit,
        "interval": None if interval is None else [interval.low, interval.high],
        "level": 1 - verdict.first_step,
        "p": verdict.test.p_value,
        "p_holm": verdict.adjusted,
        "p_holm_attainable": verdict.attainable,
        "swaps": verdict.test.resamples,
        "exact": verdict.test.exact,
        "replicates": verdict.replicates,
        **({} if share is None else {"k": share.count, "n": share.total, "discordant": share.discordant}),
    }


def _by_outcome(comparisons: Sequence[Comparison]) -> list[Finding]:
    """One line for each outcome with the arms that have it, the decided ones first."""
    control = comparisons[0].pairs.control
    arms: dict[Outcome, list[str]] = {}
    for comparison in comparisons:
        arms.setdefault(comparison.decision.outcome, []).append(comparison.pairs.treatment)
    return [
        Finding(outcome.value, f"{_AGAINST[outcome].format(control)}: {', '.join(arms[outcome])}.")
        for outcome in Outcome
        if outcome in arms
    ]


def _verdict_table(comparisons: Sequence[Comparison]) -> Table:
    primary = comparisons[0].decision.primary
    return Table(
        f"Each arm against {comparisons[0].pairs.control}: difference in {primary.claim.subject} "
        f"({primary.unit}) with its {percent(1 - primary.first_step)} interval, simultaneous over all arms.",
        ("Arm", "Verdict", "Difference", "Interval", "p (Holm)", "Reward at matched KL", "KL ratio"),
        [_verdict_row(comparison) for comparison in comparisons],
    )


def _verdict_row(comparison: Comparison) -> tuple[str, ...]:
    primary, matched, fit = comparison.decision.primary, comparison.matched, comparison.fit
    interval = primary.interval
    comparable = fit is not None and not fit.refused
    return (
        comparison.pairs.treatment,
        comparison.decision.outcome.value,
        signed(primary.estimate.value),
        "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}",
        number(primary.adjusted, 2),
        signed(matched.estimate.value) if comparable else "not comparable",
        number(kl_ratio(comparison.pairs), 2),
    )


def _sentences(comparison: Comparison) -> list[str]:
    """The conclusion and the verdicts behind it, in full."""
    decision = comparison.decision
    verdicts = (decision.primary, comparison.matched, comparison.share)
    return [*_caveat(decision), *(verdict.sentence for verdict in verdicts if verdict is not None)]


def _finding(comparison: Comparison) -> Finding:
    decision, void = comparison.decision, comparison.fit is None
    return Finding(
        decision.outcome.value,
        decision.headline,
        [
            _card(f"Difference in {'the KL' if void else 'J'}", decision.primary),
            *([] if void else [_card("Difference in reward at matched KL", comparison.matched)]),
            *_share_card(comparison),
        ],
        _sentences(comparison),
    )


def _caveat(decision: Decision) -> list[str]:
    """What a reader must know of the p-values below a headline that does not rest on them."""
    if decision.evidence is None:
        return []
    return [
        "Exploratory: the following p-values and intervals are those of a design fixed in advance, but "
        f"{decision.not_fixed}."
    ]


def _card(name: str, verdict: Verdict) -> Card:
    if math.isnan(verdict.estimate.value):
        return Card(name, "–", verdict.untested)
    how = (verdict.untested and "not tested") or f"{probability(verdict.adjusted)} (Holm)"
    detail = f"{verdict.unit}; {interval_text(verdict.interval)}; {how}"
    return Card(name, signed(verdict.estimate.value), detail)


def _share_card(comparison: Comparison) -> list[Card]:
    share = None if comparison.share is None else comparison.share.share
    if share is None:
        return []
    name = f"Frontier points of {comparison.pairs.treatment}"
    value = f"{share.count}/{share.total}" + (f" ({share.value:.0%})" if share.total else "")
    return [Card(name, value, f"{share_interval_text(share)}; describes, does not decide")]


def _counts(assessment: Assessment) -> str:
    plan, grid = assessment.sweep.plan, assessment.sweep.grid
    diverged = sum(run.diverged for run in grid.values())
    return (
        f"{count(len(plan.grid.arms), 'arm')} × {len(plan.grid.beta)} values of β × "
        f"{count(plan.grid.replicates, 'replicate')} = {len(plan.places)} runs, {len(grid)} with a result, "
        f"{diverged} of them diverged."
    )


def _inference(assessment: Assessment) -> str:
    primary, planned = assessment.comparisons[0].decision.primary, len(assessment.sweep.plan.comparisons)
    blocked = assessment.comparisons[0].pairs.blocked
    swaps = "whole replicates, because seeds are shared across β" if blocked else "single pairs"
    return (
        f"n counts replicates. The exact tests swap the labels of two arms within {swaps}; their null "
        f"hypothesis is that the outcomes of both arms are exchangeable. {primary.claim.subject} decides: "
        f"Holm's correction over {count(planned, 'planned comparison')}, intervals simultaneous, "
        f"{percent(1 - primary.first_step)} each, which is the first step of that correction: an interval "
        f"may hold 0 beside a corrected p below {primary.alpha:g} that came later. Everything else describes."
    )


def _conditions(assessment: Assessment) -> list[str]:
    """What every statement of the page is conditional on."""
    texts = []
    if assessment.sweep.plan.setting:
        texts.append(
            f"The setting: {assessment.sweep.plan.setting} What is said here is said of it and no other."
        )
    if assessment.sweep.warm_starts == 1:
        texts.append(
            "All runs share one warm start and one reference: every statement here is conditional on them, "
            "and says nothing about other checkpoints."
        )
    if any(c.pairs.diverged.any() for c in assessment.comparisons):
        texts.append(
            "Some runs diverged. They count as worst, so differences are compared by rank within each β "
            "instead of by value, and there is no comparison at matched KL."
        )
    if assessment.sweep.locked is None:
        texts.append("There is no locked plan: the design was inferred from the results themselves.")
    return texts
