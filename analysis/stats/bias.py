"""Unbiasedness as equivalence: a claim that data can support, unlike "not significantly biased".

Where a model can be enumerated, unbiasedness is an identity and needs none of this.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import stats
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from analysis.stats.intervals import jackknife_error
from analysis.stats.pairs import FloatArray

# From this index on a distribution has no variance; below so many values in the tail the index is a guess.
_NO_VARIANCE = 0.5
_ENOUGH_IN_TAIL = 20


class BiasOutcome(Enum):
    """What can be concluded about a bias."""

    EQUIVALENT = "unbiased within the margin"
    BIASED = "biased"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class BiasVerdict:
    """A bias with its margin.

    Attributes:
        bias: Estimate of the bias, in the unit of `margin`.
        low: Lower end of the 90% interval whose inside of the margin is equivalence.
        high: Its upper end.
        margin: Largest bias that counts as none, fixed in the plan.
        equivalence_p: The larger p-value of the two one-sided tests.
        difference_p: p-value of the two-sided test of no bias.
        samples: Number of independent samples.
        tail: `tail_index` of the differences whose mean is tested; NaN if it is not known.
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
        """Whether the tail is too heavy for a mean's standard error, and with it for either test.

        What makes the mean what it is may then be so rare that none of the samples has it: they agree with
        one another, and are all on one side.
        """
        return self.tail >= _NO_VARIANCE

    @property
    def outcome(self) -> BiasOutcome:
        """Equivalent if both one-sided tests reject; biased if there is a difference, beyond the margin.

        Inconclusive whatever the tests say if the tail is heavy.
        """
        if self.heavy_tailed:
            return BiasOutcome.INCONCLUSIVE
        if self.equivalence_p <= self.alpha:
            return BiasOutcome.EQUIVALENT
        if self.difference_p <= self.alpha and abs(self.bias) > self.margin:
            return BiasOutcome.BIASED
        return BiasOutcome.INCONCLUSIVE


def value_bias(
    values: FloatArray, exact: float, *, tolerance: float = 0.01, alpha: float = 0.05
) -> BiasVerdict:
    """Whether the mean of independent estimates is the exact value, within `tolerance` of it.

    Args:
        values: Estimates, one for each independent sample, shape [N].
        exact: The value they should have on average.
        tolerance: Margin as a fraction of `exact`.
        alpha: Level of each one-sided test.
    """
    return _mean_difference(values - exact, abs(tolerance * exact), alpha)


def reference_bias(
    values: FloatArray,
    reference: FloatArray,
    *,
    paired: bool,
    tolerance: float = 0.01,
    alpha: float = 0.05,
) -> BiasVerdict:
    """Whether estimates have the mean of a reference estimator known to be unbiased.

    Args:
        values: Estimates, shape [N].
        reference: Estimates by the reference, shape [M]; on the same samples if `paired`. Its own error
            counts: a mean of M draws taken for the truth makes false equivalence common.
        paired: Whether entry i of both is computed from the same sample.
        tolerance: Margin as a fraction of the reference's mean.
        alpha: Level of each one-sided test.
    """
    margin = abs(tolerance * float(reference.mean()))
    if paired:
        return _mean_difference(values - reference, margin, alpha)
    both = CompareMeans(DescrStatsW(values), DescrStatsW(reference))
    equivalence = both.ttost_ind(-margin, margin, usevar="unequal")[0]
    low, high = both.tconfint_diff(alpha=2 * alpha, usevar="unequal")
    difference = both.ttest_ind(usevar="unequal")[1]
    bias = float(values.mean() - reference.mean())
    tail = float(np.fmax(tail_index(values), tail_index(reference)))
    return _verdict(bias, low, high, margin, equivalence, difference, len(values), tail, alpha)


def tail_index(values: FloatArray) -> float:
    """Shape k of the generalised Pareto distribution fitted to the largest deviations from the median.

    Moments up to 1 / k exist: from k = 1/2 on there is no variance, from 1 on no mean. The largest
    min(N / 5, 3 sqrt(N)) deviations are the tail, those of both sides together.

    Args:
        values: Independent samples, shape [N].

    Returns:
        k; NaN with fewer than 20 values in the tail, of which nothing could be said.

    Example:
        >>> light, heavy = np.random.default_rng(0).lognormal(sigma=[[0.1], [3.0]], size=(2, 1000))
        >>> tail_index(light) < 0.5 < tail_index(heavy)
        True

    Reference: Vehtari, Simpson, Gelman, Yao, Gabry (2024), Pareto smoothed importance sampling, JMLR 25(72).
    """
    deviations = np.sort(np.abs(values - np.median(values)))
    count = int(min(len(values) / 5, 3 * np.sqrt(len(values))))
    excesses = deviations[-count:] - deviations[-count - 1]
    excesses = excesses[excesses > 0]  # among tied values there may be fewer
    if len(excesses) < _ENOUGH_IN_TAIL:
        return math.nan
    return float(stats.genpareto.fit(excesses, floc=0)[0])


def _mean_difference(differences: FloatArray, margin: float, alpha: float) -> BiasVerdict:
    """Verdict on the mean of differences, which may all be the same: then it is known."""
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return _exactly(float(differences[0]), margin, len(differences), alpha)
    sample = DescrStatsW(differences)
    equivalence = sample.ttost_mean(-margin, margin)[0]
    low, high = sample.tconfint_mean(alpha=2 * alpha)
    difference = sample.ttest_mean(0.0)[1]
    return _verdict(
        float(sample.mean),
        low,
        high,
        margin,
        equivalence,
        difference,
        len(differences),
        tail_index(differences),
        alpha,
    )


def _exactly(value: float, margin: float, samples: int, alpha: float) -> BiasVerdict:
    """Verdict on a bias without any error."""
    outside = float(not abs(value) < margin)
    return BiasVerdict(value, value, value, margin, outside, float(value == 0), samples, math.nan, alpha)


@dataclass(frozen=True)
class GradientBias:
    """Bias of a gradient estimator along the exact gradient and in norm.

    Attributes:
        scale: Bias of <g, gradient> / ||gradient||^2, a fraction.
        norm: Bias of g as ||bias||^2, over ||gradient||^2; its estimate may be negative.
    """

    scale: BiasVerdict
    norm: BiasVerdict

    @property
    def outcome(self) -> BiasOutcome:
        """Equivalent needs both parts; either may show a bias."""
        found = {self.scale.outcome, self.norm.outcome}
        if BiasOutcome.BIASED in found:
            return BiasOutcome.BIASED
        return BiasOutcome.EQUIVALENT if found == {BiasOutcome.EQUIVALENT} else BiasOutcome.INCONCLUSIVE


# The U-statistic's bound is liberal in small samples: half the level below this many.
_ENOUGH_SAMPLES = 1024


def gradient_bias(gram: FloatArray, *, tolerance: float = 0.05, alpha: float = 0.05) -> GradientBias:
    """Whether gradient estimates have the exact gradient as mean, in size and in direction.

    With h_i = g_i - gradient, U = (||sum h||^2 - sum ||h||^2) / (N (N - 1)) is unbiased for ||bias||^2. The
    norm is needed beside the scale: whole families of losses have gradients with the right length along the
    true one and anything beside it, or with mean zero.

    Args:
        gram: Inner products of the N gradient estimates followed by the exact gradient, float64,
            shape [N + 1, N + 1].
        tolerance: Margin of the scale, and of ||bias||, as a fraction of ||gradient||.
        alpha: Level of each test; halved for the norm below 1024 samples.

    Raises:
        ValueError: If the exact gradient is zero or there are fewer than three estimates.
    """
    count = len(gram) - 1
    size = float(gram[-1, -1])
    if count < 3 or not size > 0:
        raise ValueError(
            f"gram must hold at least 3 estimates and a gradient that is not zero, got {count}, {size}"
        )
    along = gram[:-1, -1] / size
    inner = (gram[:-1, :-1] - gram[:-1, -1:] - gram[-1:, :-1] + size) / size
    scale = value_bias(along, 1.0, tolerance=tolerance, alpha=alpha)
    level = alpha if count >= _ENOUGH_SAMPLES else alpha / 2
    return GradientBias(scale, _norm_bias(inner, tolerance**2, level))


def _norm_bias(inner: FloatArray, margin: float, alpha: float) -> BiasVerdict:
    """U-statistic of the off-diagonal of `inner` = <h_i, h_j>, with its jackknife error."""
    count = len(inner)
    off_diagonal = inner.sum(axis=1) - np.diag(inner)
    total = off_diagonal.sum()
    value = total / (count * (count - 1))
    left_out = (total - 2 * off_diagonal) / ((count - 1) * (count - 2))
    error = jackknife_error(left_out)
    if error == 0:
        return _exactly(float(value), margin, count, alpha)
    t = stats.t(count - 1)
    half = float(t.ppf(1 - alpha)) * error
    return BiasVerdict(
        float(value),
        float(value) - half,
        float(value) + half,
        margin,
        float(t.sf((margin - value) / error)),
        float(2 * t.sf(abs(value) / error)),
        count,
        math.nan,
        alpha,
    )


def _verdict(
    bias: float,
    low: float,
    high: float,
    margin: float,
    equivalence: float,
    difference: float,
    samples: int,
    tail: float,
    alpha: float,
) -> BiasVerdict:
    return BiasVerdict(
        bias, float(low), float(high), margin, float(equivalence), float(difference), samples, tail, alpha
    )
