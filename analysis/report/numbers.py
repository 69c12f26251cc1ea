"""The numbers of a report that programs read: `results.json` beside what its sections say."""

from typing import Any

import numpy as np

from analysis.report.assessment import Assessment
from analysis.stats import Comparison, Verdict
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.kl_reward import kl_ratio
from analysis.stats.pairs import FloatArray
from lit_klrb import schema


def summary_numbers(assessment: Assessment) -> dict[str, Any]:
    """What a program wants to know of a sweep: the plan, the problems, the verdicts, the arms, the start."""
    sweep = assessment.sweep
    locked = sweep.locked
    return {
        "plan": {
            "hash": locked and locked.hash,
            "schema": locked and locked.schema,
            "recomputed": locked is not None and locked.recomputed,
            "changed_after_results": locked is not None and locked.changed_after_results,
        },
        "problems": [problem.text for problem in sweep.problems],
        "complete": assessment.complete,
        "withheld": assessment.withheld,
        "comparisons": [_comparison(one) for one in assessment.comparisons],
        "arms": _arms(assessment),
        "start": _start(assessment),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    decision, pairs, fit = comparison.decision, comparison.pairs, comparison.fit
    return {
        "treatment": pairs.treatment,
        "control": pairs.control,
        "outcome": decision.outcome.key,
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
    """An outcome's numbers; its p-values only where there may be a verdict."""
    decided = not verdict.withheld
    return {
        "estimate": verdict.estimate.value,
        "interval": _ends(verdict.interval),
        "level": 1 - verdict.first_step,
        "p": verdict.test.p_value if decided else None,
        "p_adjusted": verdict.adjusted if decided else None,
    }


def _arms(assessment: Assessment) -> list[dict[str, Any]]:
    """Reward, KL and J of each estimator at each beta: means with 95% intervals over replicates."""
    sweep = assessment.sweep
    arms = []
    for name in sweep.plan.grid.arms:
        for index, beta in sweep.plan.grid.beta.items():
            mine = [run for run in sweep.grid.values() if run.point.place[:2] == (name, index)]
            runs = [run for run in mine if not run.diverged]
            reward, kl = (np.array([run.outcome(key) for run in runs]) for key in (schema.REWARD, schema.KL))
            arms.append(
                {
                    "label": name,
                    "beta": beta,
                    "n": len(runs),
                    "diverged": len(mine) - len(runs),
                    "reward": _mean(reward),
                    "kl": _mean(kl),
                    "objective": _mean(reward - beta * kl),
                }
            )
    return arms


def _mean(values: FloatArray) -> dict[str, Any]:
    if not len(values):
        return {"mean": None, "interval": None}
    error = float(values.std(ddof=1)) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    estimate = Estimate(float(values.mean()), error, len(values) - 1.0)
    return {"mean": estimate.value, "interval": _ends(estimate.interval())}


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _start(assessment: Assessment) -> dict[str, float | None]:
    """Reward and KL where the runs of the grid start: their evaluation before the first step."""
    found = {
        key: [value for run in assessment.sweep.grid.values() if (value := run.first(key)) is not None]
        for key in (schema.REWARD, schema.KL)
    }
    return {key: float(np.mean(values)) if values else None for key, values in found.items()}
