"""Numbers of artifacts as text with intervals, and the questions that verdicts ask of them."""

import functools
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from analysis.results.artifacts import FloatArray, ValueSnapshot, ValueStudy
from analysis.stats.contrast import LOG_RATIO
from analysis.stats.frontier import Share
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.kl_values import EstimatorSpread, estimator_spreads
from analysis.stats.text import ends_text, number, percent
from analysis.stats.verdict import Verdict
from replication.claims.claim import Number
from replication.claims.evidence import Evidence
from replication.claims.trained import Trained, better, decidable, objectives, worse
from replication.distilled import DistilledArm, distilled_arms

# Up to this, a relative distance is rounding.
ROUNDING = 1e-6


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """An estimate with its 95% interval."""
    interval = estimate.interval()
    if interval is None:
        return number(estimate.value, digits)
    low, high = (number(end, digits) for end in (interval.low, interval.high))
    return f"{number(estimate.value, digits)} ({low} to {high})"


def ratio_text(estimate: Estimate) -> str:
    """The exponential of the estimate of a log ratio, with its 95% interval."""
    interval = estimate.interval()
    if interval is None:
        return number(float(np.exp(estimate.value)))
    return ratio_ends(estimate.value, interval.low, interval.high)


def ratio_ends(log_ratio: float, low: float, high: float) -> str:
    """The exponential of a log ratio and of the ends of its interval."""
    value, *ends = (number(float(np.exp(one))) for one in (log_ratio, low, high))
    return f"{value} ({' to '.join(ends)})"


def mean_text(values: Sequence[float] | FloatArray) -> str:
    """The mean over models or runs with its 95% t interval; 0 if all are rounding."""
    column = np.asarray(values, dtype=np.float64)
    return "0" if np.abs(column).max() < ROUNDING else interval_text(Estimate.of_mean(column))


def p_text(p: float) -> str:
    """A corrected p-value."""
    return f"p {'< 0.0001' if p < 1e-4 else f'= {number(p, 2)}'}"


def log_ratio(treatment: Sequence[float] | FloatArray, control: Sequence[float] | FloatArray) -> Estimate:
    """Mean of the log of the ratio over models."""
    least = 1e-300
    return Estimate.of_mean(
        np.log(np.maximum(np.array(treatment), least)) - np.log(np.maximum(np.array(control), least))
    )


def below(estimate: Estimate, bound: float = 0.0) -> bool:
    """Whether the whole 95% interval is below a bound."""
    interval = estimate.interval()
    return estimate.value < bound if interval is None else interval.high < bound


def above(estimate: Estimate, bound: float = 0.0) -> bool:
    """Whether the whole 95% interval is above a bound."""
    interval = estimate.interval()
    return estimate.value > bound if interval is None else interval.low > bound


# The policies of `smollm2_far`, and that of `smollm2_end`.
FAR = ("dpo", "rloo at rate .002", "rloo at rate .004")
END = ("end of a run",)


def trained_cases(evidence: Evidence) -> dict[str, tuple[ValueSnapshot, ValueStudy]]:
    """The trained policies whose KL was estimated, by what a page calls them."""
    cases = {f"reviews, {run_of(one.label)}": (one, evidence.reviews) for one in evidence.reviews.snapshots}
    cases |= {f"SmolLM2, {one.label}": (one, evidence.smollm2) for one in evidence.smollm2.snapshots}
    return cases | {
        f"SmolLM2, {label}": (one, study)
        for labels, study in ((FAR, evidence.smollm2_far), (END, evidence.smollm2_end))
        for label, one in zip(labels, study.snapshots, strict=True)
    }


@functools.cache
def spreads(evidence: Evidence) -> dict[str, dict[str, EstimatorSpread]]:
    """The estimates of the KL by case and estimator: of enumerated pairs, and of trained policies."""
    cases = {one.label: (one, evidence.estimation) for one in evidence.estimation.snapshots}
    cases |= trained_cases(evidence)
    return {
        label: estimator_spreads(
            {name: one.values[name] for name in ("k1", "rb", "cv", "cv_fitted")},
            one.horvitz_thompson,
            artifact.group_sizes,
        )
        for label, (one, artifact) in cases.items()
    }


def run_of(checkpoint: str) -> str:
    """The name of the run that wrote a checkpoint, which labels a snapshot of a study."""
    return PurePosixPath(checkpoint).parts[-3]


@functools.cache
def distilled(evidence: Evidence, control: str) -> dict[str, list[DistilledArm]]:
    """The arms of the distillation study, compared with one of them."""
    return distilled_arms(evidence.distillation, control)


def objective_rows(trained: Trained, arms: Sequence[str | None], published: str = "–") -> list[Number]:
    """J of some arms against the plan's control, as rows; those that the sweep lacks are left out."""
    found, control = objectives(trained), trained.sweep.plan.primary.control
    return [
        Number(f"J of {arm} minus that of {control}, {trained.title}", published, difference_text(found[arm]))
        for arm in arms
        if arm in found
    ]


def difference_text(verdict: Verdict) -> str:
    """An estimate with its simultaneous interval, p, and the direction, if the test rejects."""
    value, of_ratio = verdict.estimate.value, verdict.unit == LOG_RATIO
    text = with_level(value, verdict.interval, ratio=of_ratio)
    unit = " of the ranks" if verdict.unit.startswith("rank") else ""
    direction = ": higher" if value > 0 else ": lower"
    if not decidable(verdict):
        direction = ", cannot reject at this design"
    elif not (better(verdict) or worse(verdict)):
        direction = ""
    note = f"; {verdict.note}" if verdict.note else ""
    return f"{text}{unit}, {p_text(verdict.adjusted)}{direction}{note}"


def with_level(value: float, interval: Interval | None, *, ratio: bool = True) -> str:
    """An estimate with its interval and the level of that, both exponentials for the log of a ratio."""
    text = number(float(np.exp(value)) if ratio else value)
    if interval is None:
        return text
    return f"{text} ({ends_text(interval.exp() if ratio else interval)} at {percent(interval.level)})"


def count_text(count: int, total: int) -> str:
    """A number of so many, with Clopper and Pearson's 95% interval of its share."""
    ends = ends_text(Share(count, total).interval)
    return f"{count} of {total} ({count / total:.0%}; {ends})"
