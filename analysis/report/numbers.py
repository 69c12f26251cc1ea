"""The summary of a report in `results.json`, for programs."""

from typing import Any

from analysis.report.assessment import Assessment
from analysis.results.layout import PLAN_SCHEMA
from analysis.stats import Comparison, Verdict
from analysis.stats.arms import OBJECTIVE, ArmOutcome, arm_outcomes, compared, start_of
from analysis.stats.intervals import Estimate
from analysis.stats.kl_reward import kl_ratio
from lit_klrb import schema


def summary_numbers(assessment: Assessment) -> dict[str, Any]:
    """The summary of a sweep: plan, problems, verdicts, arms, start."""
    sweep = assessment.sweep
    locked = sweep.locked
    return {
        "plan": {
            "hash": locked.hash,
            "schema": PLAN_SCHEMA,
            "recomputed": locked.recomputed,
            "changed_after_results": locked.changed_after_results,
        },
        "problems": [problem.text for problem in sweep.problems],
        "complete": assessment.complete,
        "withheld": assessment.withheld,
        "comparisons": [_comparison(one) for one in assessment.comparisons],
        "arms": [_arm(outcome) for outcome in arm_outcomes(sweep, compared(sweep))],
        "start": start_of(sweep),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    decision, pairs, fit = comparison.decision, comparison.pairs, comparison.fit
    return {
        "treatment": pairs.treatment,
        "control": pairs.control,
        "outcome": decision.outcome.name.lower(),
        "decided_by": None if decision.primary.withheld else decision.decided_by,
        "objective": None,
        decision.primary.claim.key: _verdict(decision.primary),
        "matched_kl": {
            **_verdict(comparison.matched),
            "overlap": None if fit is None else fit.overlap,
            "refused": comparison.matched.untested if fit is None or fit.refused else None,
        },
        "kl_ratio": kl_ratio(pairs),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    """The numbers of an outcome; without p-values if the verdict is withheld."""
    decided = not verdict.withheld
    return {
        "estimate": verdict.estimate.value,
        "interval": verdict.interval and verdict.interval.ends,
        "level": 1 - verdict.level,
        "p": verdict.test.p_value if decided else None,
        "p_adjusted": verdict.adjusted if decided else None,
    }


def _arm(outcome: ArmOutcome) -> dict[str, Any]:
    """Means of an arm at one beta with 95% intervals over replicates, and its matched differences."""
    return {
        "label": outcome.label,
        "beta": outcome.beta,
        "n": outcome.n,
        "diverged": outcome.diverged,
        **{key: None for key in (schema.REWARD, schema.KL, OBJECTIVE)},
        **{key: _mean(estimate) for key, estimate in outcome.means.items()},
        "difference": {
            key: _mean(estimate) | {"pairs": outcome.pairs, "higher": outcome.higher[key]}
            for key, estimate in outcome.differences.items()
        }
        or None,
    }


def _mean(estimate: Estimate) -> dict[str, Any]:
    interval = estimate.interval()
    return {"mean": estimate.value, "interval": interval and interval.ends}
