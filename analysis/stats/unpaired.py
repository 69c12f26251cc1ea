"""Means of two independent groups of runs and their difference, after Welch."""

import math
from collections.abc import Sequence

from scipy import stats

from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray


def mean_over(strata: Sequence[FloatArray]) -> Estimate:
    """The unweighted mean over strata of each stratum's mean.

    Args:
        strata: Independent values of each stratum (KL weight), shape [n] each.

    Returns:
        The estimate with Satterthwaite's degrees of freedom; `nan` if a stratum has no values, without a
        standard error if one has fewer than two.
    """
    return _combined([(values, 1.0 / len(strata)) for values in strata])


def difference(ours: Sequence[FloatArray], theirs: Sequence[FloatArray]) -> Estimate:
    """The unweighted mean over strata of mean(ours) - mean(theirs); with one stratum that of Welch's test.

    Args:
        ours: Independent values of each stratum, shape [n] each.
        theirs: The same strata of the other group, shape [m] each.

    Raises:
        ValueError: If the groups have different numbers of strata.

    Example:
        >>> import numpy as np
        >>> found = difference([np.array([1.0, 2.0, 3.0])], [np.array([1.0, 1.0, 4.0, 2.0])])
        >>> round(found.value, 3), round(two_sided_p(found), 3)
        (0.0, 1.0)
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} strata against {len(theirs)}")
    share = 1.0 / len(ours)
    return _combined([(values, share) for values in ours] + [(values, -share) for values in theirs])


def two_sided_p(estimate: Estimate) -> float:
    """The p-value of a t test of no difference; `nan` without a standard error."""
    if not estimate.degrees > 0:
        return math.nan
    if estimate.standard_error == 0:
        return 0.0 if estimate.value else 1.0
    return float(2 * stats.t.sf(abs(estimate.value) / estimate.standard_error, estimate.degrees))


def _combined(groups: Sequence[tuple[FloatArray, float]]) -> Estimate:
    """A weighted sum of the means of independent groups."""
    if any(not len(values) for values, _ in groups):
        return Estimate(math.nan)
    value = sum(weight * float(values.mean()) for values, weight in groups)
    if any(len(values) < 2 for values, _ in groups):
        return Estimate(value)
    parts = [(weight**2 * float(values.var(ddof=1)) / len(values), len(values)) for values, weight in groups]
    variance = sum(part for part, _ in parts)
    shrink = sum(part**2 / (count - 1) for part, count in parts)
    degrees = variance**2 / shrink if shrink > 0 else float(sum(count - 1 for _, count in parts))
    return Estimate(value, math.sqrt(variance), degrees)
