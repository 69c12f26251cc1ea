"""Tests of unbiasedness as equivalence within a margin: "not significantly biased" does not imply unbiased.

If a model can be enumerated, unbiasedness is verified exactly instead.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from analysis.stats.pairs import FloatArray

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
        bias: Estimate of the bias, in the unit of `margin`.
        low: Lower end of the 90% interval; within the margin it means equivalence.
        high: Upper end of that interval.
        margin: Largest bias that is regarded as none, fixed in the plan.
        equivalence_p: The larger p-value of the two one-sided tests.
        difference_p: p-value of the two-sided test of no bias.
        samples: Number of independent samples.
        tail: `tail_index` of the differences whose mean is tested; NaN if unknown.
        alpha: Level of each test.
    """

    bias: float
    low: float
    high: float
    margin: float
    equivalence_p: float
    difference_p: float
    samples: int
    tail: float
    alpha: float = 0.05

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
        if self.equivalence_p <= self.alpha:
            return BiasOutcome.EQUIVALENT
        if self.difference_p <= self.alpha and abs(self.bias) > self.margin:
            return BiasOutcome.BIASED
        return BiasOutcome.INCONCLUSIVE


def reference_bias(
    values: FloatArray, reference: FloatArray, *, tolerance: float = 0.01, alpha: float = 0.05
) -> BiasVerdict:
    """Test whether estimates have the same mean as an unbiased reference estimator on the same samples.

    Args:
        values: Estimates, shape [N].
        reference: Estimates of the reference from the same samples, shape [N].
        tolerance: Margin as a fraction of the reference's mean.
        alpha: Level of each one-sided test.
    """
    return _mean_difference(values - reference, abs(tolerance * float(reference.mean())), alpha)


def standard_bias(
    values: FloatArray,
    standard: FloatArray,
    standard_error: FloatArray,
    *,
    tolerance: float = 0.01,
    alpha: float = 0.05,
) -> BiasVerdict:
    """Test whether estimates have a mean that is known exactly, or from an independent sample.

    What is found holds for these prompts: the variance is that of their completions and of the independent
    sample (Welch).

    Args:
        values: Independent estimates for each prompt, shape [P, N].
        standard: The KL of each prompt, shape [P].
        standard_error: Its standard errors, shape [P]; zeros if exact.
        tolerance: Margin as a fraction of the mean of `standard`.
        alpha: Level of each one-sided test.

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
    if error == 0:
        return _exactly(bias, margin, values.size, alpha)
    degrees = float((own + others).sum() ** 2 / (own**2).sum() * (count - 1)) if own.any() else math.inf
    distribution = stats.t(degrees) if math.isfinite(degrees) else stats.norm()
    equivalence = float(distribution.sf((margin - abs(bias)) / error))
    difference = float(2 * distribution.sf(abs(bias) / error))
    half = float(distribution.isf(alpha)) * error
    deviations = (values - values.mean(axis=1, keepdims=True)).ravel()
    return BiasVerdict(
        bias,
        bias - half,
        bias + half,
        margin,
        equivalence,
        difference,
        values.size,
        tail_index(deviations),
        alpha,
    )


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


def _mean_difference(differences: FloatArray, margin: float, alpha: float) -> BiasVerdict:
    """Verdict on the mean of differences; if all are equal, the mean is known exactly."""
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return _exactly(float(differences[0]), margin, len(differences), alpha)
    sample = DescrStatsW(differences)
    equivalence = sample.ttost_mean(-margin, margin)[0]
    low, high = sample.tconfint_mean(alpha=2 * alpha)
    difference = sample.ttest_mean(0.0)[1]
    return BiasVerdict(
        float(sample.mean),
        float(low),
        float(high),
        margin,
        float(equivalence),
        float(difference),
        len(differences),
        tail_index(differences),
        alpha,
    )


def _exactly(value: float, margin: float, samples: int, alpha: float) -> BiasVerdict:
    """Verdict on a bias that is known exactly."""
    outside = float(not abs(value) < margin)
    return BiasVerdict(value, value, value, margin, outside, float(value == 0), samples, math.nan, alpha)
