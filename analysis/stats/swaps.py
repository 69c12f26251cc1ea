"""Exact permutation tests that swap the labels of matched pairs, and intervals: what they do not reject.

If the true difference is d, swapping a pair's labels changes the sign of its value less d. The sum of the
swapped values is then at least the observed one if and only if the weighted mean of the units that are
swapped is at most d. The p-value of every d, and so the interval, follows from these means of all swaps
(the typical values of J. A. Hartigan, JASA 64, 1969): p is at most a level if and only if the interval of
that level excludes 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from analysis.stats.intervals import Interval
from analysis.stats.pairs import FloatArray, IntArray

RESAMPLES = 9_999
"""Number of random swaps; designs with up to 2**13 swaps are enumerated instead."""

# Statistics that differ by less than this share of the size of their terms are tied, so that ties survive
# rounding errors. A tolerance relative to the observed value would be 0 if that value is 0, and rounding to a
# grid would tear apart ties at the middle between two of its points.
TIE = 2.0**-32
# Relative rounding error of a number of swaps.
_ROUNDING = 1e-9
# Share of all sizes below which a size is set to it, so that ratios are finite.
_LEAST = 1e-12


@dataclass(frozen=True)
class SwapTest:
    """A p-value, and the smallest one that the test can attain."""

    p_value: float  # probability of a statistic at least as extreme under exchangeable labels
    attainable: float  # smallest attainable p-value with these units: all contributions have the same sign
    units: int  # number of units whose swap changes the statistic
    resamples: int  # number of swaps evaluated: all if `exact`, else the number of random swaps
    exact: bool  # whether every swap was enumerated
    # Two-sided level -> the interval of a mean, which excludes 0 if and only if p is at most the level; None
    # for a statistic without one
    interval: Callable[[float], Interval | None] | None = field(default=None, repr=False, compare=False)


def upper_p(
    observed: FloatArray, null: FloatArray, *, exact: bool, tolerance: FloatArray | float
) -> FloatArray:
    """One-sided p-values of statistics [...]: the share of swaps, `null` [swaps, ...], that are as large.

    Random swaps are not all: the observed labelling is added to them. Differences up to `tolerance` are ties.
    """
    extra = 0 if exact else 1
    return np.asarray(((null >= observed - tolerance).sum(axis=0) + extra) / (len(null) + extra))


def swap_signs(units: int, resamples: int) -> tuple[FloatArray, bool]:
    """Signs of swaps, shape [swaps, units], and whether they are all possible swaps.

    Args:
        units: Number of units that can be swapped.
        resamples: Number of random swaps if enumeration would need more.
    """
    if units <= math.log2(resamples):  # not 2**units, which can be too large for a float
        patterns = (np.arange(2**units)[:, None] >> np.arange(units)) & 1
        return np.asarray(1.0 - 2.0 * patterns, dtype=np.float64), True
    return np.random.default_rng(0).choice((-1.0, 1.0), size=(resamples, units)), False


def unit_sums(contributions: FloatArray, units: IntArray | None = None) -> FloatArray:
    """Sums of the contributions of each unit, shape [units]."""
    if units is None:
        return contributions
    return np.array([contributions[units == unit].sum() for unit in np.unique(units)])


@dataclass(frozen=True, eq=False)
class Inversion:
    """The differences that a swap test does not reject, at every level."""

    centre: float  # the weighted mean
    # The weighted mean of the units that each swap changes, ascending; of swaps that change any
    means: FloatArray
    swaps: int  # number of swaps, the observed labelling included
    # Variance of an independent error of the mean, added in quadrature to each half of the interval: that of
    # the choice of rates
    variance: float = 0.0

    def interval(self, level: float) -> Interval | None:
        """The interval at a two-sided level; None if no difference can be rejected at it."""
        unchanged = self.swaps - len(self.means)
        rank = math.floor(self.swaps * level / 2 * (1 + _ROUNDING)) - unchanged
        if not 0 <= rank < len(self.means):
            return None
        other = stats.norm.isf(level / 2) * math.sqrt(self.variance)
        low, high = (math.hypot(self.centre - self.means[index], other) for index in (rank, -1 - rank))
        return Interval(self.centre - low, self.centre + high, 1 - level)

    @property
    def p_value(self) -> float:
        """The smallest level whose interval excludes 0; 1 if there is none."""
        if self.centre == 0:
            return 1.0
        means, centre = np.sign(self.centre) * self.means, abs(self.centre)
        means = means if self.centre > 0 else means[::-1]
        levels = 2 * (np.arange(len(means)) + self.swaps - len(means)) / self.swaps
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 stands for an end at 0
            reach = np.sqrt(np.maximum(0.0, centre**2 - np.maximum(0.0, centre - means) ** 2))
            other = 2 * stats.norm.sf(np.nan_to_num(reach / math.sqrt(self.variance), posinf=math.inf))
        return min(1.0, float(np.maximum(levels, other)[means > 0].min(initial=1.0)))


def mean_swap_test(
    values: FloatArray,
    weights: FloatArray | None = None,
    units: IntArray | None = None,
    *,
    variance: float = 0.0,
    resamples: int = RESAMPLES,
) -> SwapTest:
    """The two-sided swap test of a weighted mean of values, with its interval at every level.

    The null hypothesis is sharp: within each unit the outcomes of the two runs are exchangeable. All 2**n
    swaps of n units are enumerated if these are at most `resamples`; otherwise, of random swaps,
    p = (1 + #{null >= observed}) / (1 + resamples), doubled for two sides.

    Args:
        values: Value of each pair, whose sign a swap changes under the null hypothesis, shape [P]; finite.
        weights: Positive weights, shape [P]; equal by default.
        units: Pairs with equal entries are swapped together, shape [P]; by default each pair separately.
        variance: As of `Inversion`.
        resamples: Number of random swaps if enumeration would need more.

    Raises:
        ValueError: If a value is not finite.

    Example:
        >>> found = mean_swap_test(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))  # 2 of 64 swaps
        >>> found.p_value, found.interval(0.05).ends
        (0.03125, [1.0, 6.0])
    """
    weights = np.ones(len(values)) if weights is None else weights
    if not np.isfinite(values).all():
        raise ValueError("values must be finite: rank diverged runs last before testing")
    sums, sizes = unit_sums(values * weights, units), unit_sums(weights, units)
    scale = float(np.abs(values * weights).max(initial=0.0))
    return _inverted(sums, sizes, scale, resamples, variance)


def ratio_swap_test(
    numerators: FloatArray,
    denominators: FloatArray,
    units: IntArray | None = None,
    *,
    resamples: int = RESAMPLES,
) -> tuple[float, SwapTest]:
    """The log of the ratio of two sums of matched sizes, and its swap test.

    If the true ratio is r, a swap exchanges r times a denominator with its numerator: the ratio of the sums
    over the pairs that are swapped takes the place of their mean.

    Args:
        numerators: Sizes, not negative, shape [P].
        denominators: Those of the other, not negative, shape [P].
        units: As of `mean_swap_test`.
        resamples: As of `mean_swap_test`.

    Example:
        >>> ratio, found = ratio_swap_test(np.arange(1.0, 7.0), 2 * np.arange(1.0, 7.0))
        >>> round(math.exp(ratio), 3), found.p_value, np.exp(found.interval(0.05).ends).round(3).tolist()
        (0.5, 0.03125, [0.5, 0.5])
    """
    least = np.finfo(float).tiny + _LEAST * float(numerators.sum() + denominators.sum())
    numerators, denominators = (
        np.maximum(unit_sums(sizes, units), least) for sizes in (numerators, denominators)
    )
    ratio = math.log(numerators.sum() / denominators.sum()) if len(numerators) else 0.0
    scale = float(np.maximum(numerators, denominators).max(initial=0.0))
    return ratio, _inverted(numerators - denominators, denominators, scale, resamples, transform=np.log1p)


def _inverted(
    sums: FloatArray,
    sizes: FloatArray,
    scale: float,
    resamples: int,
    variance: float = 0.0,
    transform: Callable[[FloatArray], FloatArray] = np.asarray,
) -> SwapTest:
    """The test that the sums, each less its size times the true difference, change their sign under swaps.

    Args:
        sums: Sum of each unit, shape [units].
        sizes: Its positive size.
        scale: Size of the terms of the sums, to which rounding errors are relative.
        resamples: As of `mean_swap_test`.
        variance: As of `Inversion`.
        transform: Increasing function of differences, 0 at 0, of whose values the interval is.
    """
    tolerance = scale * TIE
    signs, exact = swap_signs(len(sums), resamples)
    swapped = np.concatenate([np.ones((1, len(sums))), signs < 0])
    swapped = swapped[swapped.any(axis=1)]  # first the whole, then the swaps that change any unit
    parts = swapped @ sums
    parts[np.abs(parts) <= tolerance] = 0.0
    means = transform(parts / (swapped @ sizes)) if len(sums) else np.zeros(1)
    inversion = Inversion(float(means[0]), np.sort(means[1:]), len(signs) + (not exact), variance)
    informative = int((np.abs(sums) > tolerance).sum())
    least = min(1.0, max(2.0 ** (1 - informative), 0.0 if exact else 2 / inversion.swaps))
    return SwapTest(inversion.p_value, least, informative, len(signs), exact, inversion.interval)
