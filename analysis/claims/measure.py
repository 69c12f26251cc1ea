"""Numbers of artifacts as text with intervals, and the questions that verdicts ask of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.claims.evidence import Evidence
from analysis.results.arrays import FloatArray
from analysis.stats.arms import mean_over_replicates
from analysis.stats.distillation import DistilledArm, distilled_arms
from analysis.stats.intervals import Estimate
from analysis.stats.kl_values import EstimatorSpread, estimator_spreads
from analysis.stats.text import number

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
    value = number(float(np.exp(estimate.value)))
    if interval is None:
        return value
    return f"{value} ({number(float(np.exp(interval.low)))} to {number(float(np.exp(interval.high)))})"


def mean_text(values: Sequence[float] | FloatArray) -> str:
    """The mean over models or runs with its 95% t interval; 0 if all are rounding."""
    column = np.asarray(values, dtype=np.float64)
    return "0" if np.abs(column).max() < ROUNDING else interval_text(mean_over_replicates(column))


def p_text(p: float) -> str:
    """A p-value after Holm's correction."""
    return f"p {'< 0.0001' if p < 1e-4 else f'= {number(p, 2)}'} (Holm)"


def log_ratio(treatment: Sequence[float], control: Sequence[float]) -> Estimate:
    """Mean of the log of the ratio over models."""
    least = 1e-300
    return mean_over_replicates(
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


def spreads(evidence: Evidence) -> dict[str, dict[str, EstimatorSpread]]:
    """The estimates of the enumerated pairs, by pair and estimator."""
    artifact = evidence.estimation
    return {
        one.label: estimator_spreads(
            one.values,
            one.horvitz_thompson,
            artifact.group_sizes,
            tolerance=artifact.tolerance,
            standard=None
            if one.standard is None or one.standard_error is None
            else (one.standard, one.standard_error),
        )
        for one in artifact.snapshots
    }


def reviewed(evidence: Evidence, estimator: str) -> list[dict[str, Any]]:
    """The numbers of an estimator on film reviews, at each snapshot."""
    by_step: dict[str, Any] = evidence.reviews["sections"]["estimation"]
    return [found[estimator] for found in by_step.values() if estimator in found]


def distilled(evidence: Evidence, control: str) -> dict[str, list[DistilledArm]]:
    """The arms of the distillation study, compared with one of them."""
    return distilled_arms(evidence.distillation, control)
