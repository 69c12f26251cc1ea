"""The verdict, with the counts it rests on."""

from typing import Any

from analysis.report.assessment import Study
from analysis.report.elements import Card, Finding, Section
from analysis.stats import Comparison, Verdict
from analysis.stats.text import count, interval_text, probability, share_interval_text, signed

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
    ("Replicate", "one repetition of the whole grid with its own seeds; n counts these"),
    (
        "Swap p-value",
        "how often a difference as large appears if the estimators' names are exchanged at random within the "
        "matched pairs",
    ),
)


def summary(study: Study) -> Section:
    """One finding for each comparison, or why there is none yet."""
    sweep = study.sweep
    if not study.complete:
        waiting = len(sweep.missing)
        text = (
            f"There is no verdict: {waiting} of {len(sweep.plan.points)} planned runs have no result yet. "
            f"What follows shows what is there; {_looking(study)}"
            if waiting
            else "There is no verdict: no two runs form a matched pair."
        )
        return Section(
            "verdict", "No verdict yet", paragraphs=[text], glossary=GLOSSARY, numbers={"complete": False}
        )
    comparisons = study.comparisons
    return Section(
        "verdict",
        "What this sweep says",
        findings=[_finding(comparison) for comparison in comparisons],
        paragraphs=[_design(study), *_conditions(study)],
        glossary=GLOSSARY,
        numbers={
            "complete": True,
            "decisions": {c.pairs.treatment: c.decision.outcome.value for c in comparisons},
            "verdicts": {c.pairs.treatment: [verdict_numbers(v) for v in c.verdicts] for c in comparisons},
        },
    )


def _looking(study: Study) -> str:
    if study.sweep.plan.sequential:
        return "the evidence pair by pair is valid at any look, nothing else here is."
    return "looking at it must not decide when the sweep stops."


def verdict_numbers(verdict: Verdict) -> dict[str, Any]:
    """Everything a verdict says, for `results.json`."""
    interval, share = verdict.interval, verdict.share
    return {
        "claim": verdict.claim.key,
        "outcome": verdict.outcome.value,
        "estimate": verdict.estimate.value,
        "unit": verdict.unit,
        "interval": None if interval is None else [interval.low, interval.high],
        "p": verdict.test.p_value,
        "p_holm": verdict.adjusted,
        "p_holm_attainable": verdict.attainable,
        "swaps": verdict.test.resamples,
        "exact": verdict.test.exact,
        "replicates": verdict.replicates,
        **({} if share is None else {"k": share.count, "n": share.total, "discordant": share.discordant}),
    }


def _finding(comparison: Comparison) -> Finding:
    decision, share = comparison.decision, comparison.share
    return Finding(
        decision.outcome.value,
        decision.headline,
        [
            _card("Difference in J", decision.objective),
            _card("Difference in reward at matched KL", decision.matched),
            _share_card(comparison),
        ],
        [decision.objective.sentence, decision.matched.sentence, share.sentence],
    )


def _card(name: str, verdict: Verdict) -> Card:
    detail = f"{verdict.unit}; {interval_text(verdict.interval)}; {probability(verdict.adjusted)} (Holm)"
    return Card(name, signed(verdict.estimate.value), detail)


def _share_card(comparison: Comparison) -> Card:
    share = comparison.share.share
    assert share is not None
    name = f"Frontier points of {comparison.pairs.treatment}"
    value = f"{share.count}/{share.total}" + (f" ({share.value:.0%})" if share.total else "")
    return Card(name, value, f"{share_interval_text(share)}; describes, does not decide")


def _design(study: Study) -> str:
    plan, grid = study.sweep.plan, study.sweep.grid
    diverged = sum(run.diverged for run in grid.values())
    pairs = study.comparisons[0].pairs
    swaps = "whole replicates, because seeds are shared across β" if pairs.blocked else "single pairs"
    return (
        f"Design: {count(len(plan.estimators), 'estimator')} × {len(plan.betas)} values of β × "
        f"{count(plan.replicates, 'replicate')} = {len(plan.points)} runs, {len(grid)} with a result, "
        f"{diverged} of them diverged. n counts replicates. The exact tests swap the estimators' labels "
        f"within {swaps}; their null hypothesis is that the two estimators' outcomes are exchangeable. "
        "Intervals are for one comparison at a time; p-values are corrected for all of them (Holm)."
    )


def _conditions(study: Study) -> list[str]:
    texts = []
    if study.sweep.plan.setting:
        texts.append(f"The setting: {study.sweep.plan.setting} What is said here is said of it and no other.")
    if study.sweep.warm_starts == 1:
        texts.append(
            "All runs share one warm start and one reference: every statement here is conditional on them, "
            "and says nothing about other checkpoints."
        )
    if any(c.decision.objective.unit != "reward units" for c in study.comparisons):
        texts.append(
            "Some runs diverged. They count as worst, so J and the reward at matched KL are compared by rank "
            "within each β instead of by value."
        )
    if study.sweep.plan.digest is None:
        texts.append("There is no locked plan: the design was inferred from the results themselves.")
    return texts
