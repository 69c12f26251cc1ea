"""Tests of unbiasedness as equivalence within a margin: "not significantly biased" does not imply unbiased.

If a model can be enumerated, unbiasedness is verified exactly instead.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, Interval
from analysis.stats.pairs import FloatArray

# Level of each test.
ALPHA = 0.05
# A distribution with at least this tail index has no variance; with fewer values in the tail the index cannot
# be estimated.
_NO_VARIANCE = 0.5
_ENOUGH_IN_TAIL = 20


class BiasOutcome(Enum):
    """What can be concluded about a bias."""

    EQUIVALENT = "unbiased within the margin"
    BIASED = "biased"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class BiasVerdict:
    """An estimated bias and its tests.

    Attributes:
        estimate: The bias, in the unit of `margin`.
        margin: Largest bias that is regarded as none, fixed in the plan.
        tail: `tail_index` of the differences whose mean is tested; NaN if unknown.
        equivalence_p: The larger p-value of the two one-sided tests, corrected.
        difference_p: p-value of the two-sided test of no bias, corrected.
        family: Number of biases over which both are corrected.
    """

    estimate: Estimate
    margin: float
    tail: float
    equivalence_p: float
    difference_p: float
    family: int = 1

    @classmethod
    def of(cls, estimate: Estimate, margin: float, tail: float = math.nan) -> Self:
        """The verdict before any correction."""
        return cls(estimate, margin, tail, estimate.equivalence_p(margin), estimate.p_value)

    @property
    def interval(self) -> Interval | None:
        """The interval that means equivalence if it is within the margin: of 90% for a single bias."""
        return self.estimate.interval(1 - 2 * ALPHA / self.family)

    @property
    def heavy_tailed(self) -> bool:
        """Whether the tail is too heavy for the standard error of a mean, and therefore for both tests.

        The mean may then be dominated by values so rare that the samples contain none of them.
        """
        return self.tail >= _NO_VARIANCE

    @property
    def outcome(self) -> BiasOutcome:
        """Equivalent if both one-sided tests reject, biased if there is a difference beyond the margin.

        Always inconclusive if the tail is heavy.
        """
        if self.heavy_tailed:
            return BiasOutcome.INCONCLUSIVE
        if self.equivalence_p <= ALPHA:
            return BiasOutcome.EQUIVALENT
        if self.difference_p <= ALPHA and abs(self.estimate.value) > self.margin:
            return BiasOutcome.BIASED
        return BiasOutcome.INCONCLUSIVE


def reference_bias(values: FloatArray, reference: FloatArray, *, tolerance: float = 0.01) -> BiasVerdict:
    """Test whether estimates have the same mean as an unbiased reference estimator on the same samples.

    Args:
        values: Estimates, shape [N].
        reference: Estimates of the reference from the same samples, shape [N].
        tolerance: Margin as a fraction of the reference's mean.
    """
    differences = values - reference
    margin = abs(tolerance * float(reference.mean()))
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return BiasVerdict.of(Estimate(float(differences[0]), 0.0, math.inf), margin)
    return BiasVerdict.of(Estimate.of_mean(differences), margin, tail_index(differences))


def standard_bias(
    values: FloatArray, standard: FloatArray, standard_error: FloatArray, *, tolerance: float = 0.01
) -> BiasVerdict:
    """Test whether estimates have a mean that is known exactly, or from an independent sample.

    What is found holds for these prompts: the variance is that of their completions and of the independent
    sample (Welch).

    Args:
        values: Independent estimates for each prompt, shape [P, N].
        standard: The KL of each prompt, shape [P].
        standard_error: Its standard errors, shape [P]; zeros if exact.
        tolerance: Margin as a fraction of the mean of `standard`.

    Example:
        >>> values = np.random.default_rng(0).normal(1.0, 0.1, size=(4, 1000))
        >>> standard_bias(values, np.ones(4), np.zeros(4), tolerance=0.05).outcome.name
        'EQUIVALENT'
        >>> standard_bias(values + 0.2, np.ones(4), np.zeros(4), tolerance=0.05).outcome.name
        'BIASED'
    """
    prompts, count = values.shape
    bias = float(values.mean() - standard.mean())
    own, others = values.var(axis=1, ddof=1) / count, standard_error**2
    error = float(np.sqrt((own + others).sum()) / prompts)
    margin = abs(tolerance * float(standard.mean()))
    if error == 0:  # known exactly
        return BiasVerdict.of(Estimate(bias, 0.0, math.inf), margin)
    degrees = float((own + others).sum() ** 2 / (own**2).sum() * (count - 1)) if own.any() else math.inf
    deviations = (values - values.mean(axis=1, keepdims=True)).ravel()
    return BiasVerdict.of(Estimate(bias, error, degrees), margin, tail_index(deviations))


def tail_index(values: FloatArray) -> float:
    """Shape k of the generalised Pareto distribution fitted to the largest deviations from the median.

    Moments of order below 1 / k exist: with k >= 1/2 there is no variance, with k >= 1 no mean. The tail
    consists of the largest min(N / 5, 3 sqrt(N)) deviations, both sides together.

    Args:
        values: Independent samples, shape [N].

    Returns:
        k; NaN with fewer than 20 values in the tail, which are too few to estimate it.

    Example:
        >>> light, heavy = np.random.default_rng(0).lognormal(sigma=[[0.1], [3.0]], size=(2, 1000))
        >>> tail_index(light) < 0.5 < tail_index(heavy)
        True

    Reference: Vehtari, Simpson, Gelman, Yao, Gabry (2024), Pareto smoothed importance sampling, JMLR 25(72).
    """
    deviations = np.sort(np.abs(values - np.median(values)))
    count = int(min(len(values) / 5, 3 * np.sqrt(len(values))))
    excesses = deviations[-count:] - deviations[-count - 1]
    excesses = excesses[excesses > 0]  # ties reduce their number
    if len(excesses) < _ENOUGH_IN_TAIL:
        return math.nan
    return float(stats.genpareto.fit(excesses, floc=0)[0])
