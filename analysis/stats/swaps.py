"""Exact permutation tests that swap the labels of matched pairs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import stats

from analysis.stats.intervals import Interval
from analysis.stats.pairs import FloatArray, IntArray

Alternative = Literal["two-sided", "greater", "less"]

RESAMPLES = 9_999
"""Number of random swaps; designs with up to 2**13 swaps are enumerated instead."""

# Statistics that differ by less than this share of the size of their terms are tied, so that ties survive
# rounding errors. A tolerance relative to the observed value would be 0 if that value is 0, and rounding to a
# grid would tear apart ties at the middle between two of its points.
TIE = 2.0**-32


@dataclass(frozen=True)
class SwapTest:
    """A p-value, and the smallest one that the test can attain.

    Attributes:
        p_value: Probability of a statistic at least as extreme under exchangeable labels.
        attainable: Smallest attainable p-value with these units: all contributions have the same sign.
        units: Number of units whose swap changes the statistic.
        resamples: Number of swaps evaluated: all if `exact`, else the number of random swaps.
        exact: Whether every swap was enumerated.
        interval: Two-sided level -> the interval of a mean, which excludes 0 if and only if p is at most the
            level (see `inversion`); None for a statistic without one.
    """

    p_value: float
    attainable: float
    units: int
    resamples: int
    exact: bool
    interval: Callable[[float], Interval | None] | None = field(default=None, repr=False, compare=False)


def swap_test(
    contributions: FloatArray, units: IntArray | None = None, *, resamples: int = RESAMPLES
) -> SwapTest:
    """Test whether sum(contributions) is 0, where swapping a pair's labels changes its contribution's sign.

    The null hypothesis is sharp: within each unit the outcomes of the two runs are exchangeable. With n units
    whose contribution is not 0, all 2**n swaps are enumerated if these are at most `resamples`; otherwise
    p = (1 + #{null >= observed}) / (1 + resamples), doubled for two sides.

    Args:
        contributions: Antisymmetric contribution of each pair, shape [P]; finite.
        units: Pairs with equal entries are swapped together, shape [P]; by default each pair separately.
        resamples: Number of random swaps if enumeration would need more.

    Returns:
        The two-sided test, conditional on the units whose contribution is 0.

    Raises:
        ValueError: If a contribution is not finite.

    Example:
        >>> swap_test(np.array([1.0, 2.0, 3.0, 4.0, 5.0])).p_value  # 2 of 32 swaps
        0.0625
    """
    if not np.isfinite(contributions).all():
        raise ValueError("contributions must be finite: rank diverged runs last before testing")
    sums = unit_sums(contributions, units)
    sums = sums[np.abs(sums) > np.abs(contributions).max(initial=0.0) * TIE]
    count = len(sums)
    if count and np.ptp(np.abs(sums)) <= np.abs(sums[0]) * TIE:  # equal sizes: a sign test
        p_value = stats.binomtest(int((sums > 0).sum()), count).pvalue
        return SwapTest(float(p_value), min(1.0, 2 * 2.0**-count), count, 2**count, True)
    scale = float(np.abs(contributions).max(initial=0.0))
    return sign_flip_test(count, lambda signs: signs @ sums, scale=scale, resamples=resamples)


def sign_flip_test(
    count: int,
    statistic: Callable[[FloatArray], FloatArray],
    *,
    scale: float = 1.0,
    alternative: Alternative = "two-sided",
    resamples: int = RESAMPLES,
) -> SwapTest:
    """Swap test of a statistic that is not a sum of contributions.

    Args:
        count: Number of units that can be swapped.
        statistic: Maps signs [..., count], -1 where a unit is swapped, to values [...]; all +1 is the
            observed labelling.
        scale: Size of the terms of the statistic, to which rounding errors are relative.
        alternative: The values that are evidence against the null hypothesis: "two-sided" for an
            antisymmetric statistic, "greater" for one that is invariant if all signs change, such as a
            maximum of absolute values.
        resamples: Number of random swaps if enumeration would need more.
    """
    observed, mirrored = statistic(np.ones(count)), statistic(-np.ones(count))
    sides = 2 if alternative == "two-sided" or abs(observed - mirrored) <= scale * TIE else 1
    signs, exact = swap_signs(count, resamples)
    p_value = float(p_values(observed, statistic(signs), alternative, exact=exact, tolerance=scale * TIE))
    least = min(1.0, sides * (2.0**-count if exact else 1 / (resamples + 1)))
    return SwapTest(p_value, least, count, len(signs), exact)


def p_values(
    observed: FloatArray, null: FloatArray, alternative: Alternative, *, exact: bool, tolerance: float = 0.0
) -> FloatArray:
    """p-values of statistics from those of their swaps, as in `scipy.stats.permutation_test`.

    Args:
        observed: Statistics, shape [...].
        null: The statistics of each swap, shape [swaps, ...].
        alternative: The values that are evidence against the null hypothesis; "two-sided" doubles the smaller
            one-sided p-value.
        exact: Whether `null` has all swaps; if not, the observed labelling is added to them.
        tolerance: Differences up to which values are regarded as tied.
    """
    extra = 0 if exact else 1
    upper = ((null >= observed - tolerance).sum(axis=0) + extra) / (len(null) + extra)
    lower = ((null <= observed + tolerance).sum(axis=0) + extra) / (len(null) + extra)
    if alternative == "two-sided":
        return np.asarray(np.minimum(1.0, 2 * np.minimum(upper, lower)))
    return np.asarray(upper if alternative == "greater" else lower)


def swap_signs(units: int, resamples: int, seed: int = 0) -> tuple[FloatArray, bool]:
    """Signs of swaps, shape [swaps, units], and whether they are all possible swaps.

    Args:
        units: Number of units that can be swapped.
        resamples: Number of random swaps if enumeration would need more.
        seed: Seed of the random swaps.
    """
    if units <= math.log2(resamples):  # not 2**units, which can be too large for a float
        patterns = (np.arange(2**units)[:, None] >> np.arange(units)) & 1
        return np.asarray(1.0 - 2.0 * patterns, dtype=np.float64), True
    return np.random.default_rng(seed).choice((-1.0, 1.0), size=(resamples, units)), False


def unit_sums(contributions: FloatArray, units: IntArray | None = None) -> FloatArray:
    """Sums of the contributions of each unit, shape [units]."""
    if units is None:
        return contributions
    return np.array([contributions[units == unit].sum() for unit in np.unique(units)])
