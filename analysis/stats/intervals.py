"""Estimates with intervals, equivalence and the smallest detectable effect of a paired design."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy import optimize, stats

from analysis.stats.pairs import FloatArray, IntArray

# The power that a design should have.
POWER = 0.8
# Quantiles of an estimated standard error over which power is averaged, and the largest effect considered.
_QUANTILES = 200
_MOST_ERRORS = 1e6


@dataclass(frozen=True)
class Interval:
    """A two-sided interval with its level."""

    low: float
    high: float
    level: float

    @property
    def ends(self) -> list[float]:
        """Lower and upper end, as in `results.json`."""
        return [self.low, self.high]

    def within(self, margin: float) -> bool:
        """Whether it is inside ±margin: TOST at level alpha, for an interval of level 1 - 2 alpha."""
        return -margin < self.low and self.high < margin

    def exp(self) -> "Interval":
        """The interval of a ratio, from that of its logarithm."""
        return Interval(math.exp(self.low), math.exp(self.high), self.level)


@dataclass(frozen=True)
class Estimate:
    """A mean with a t reference distribution."""

    value: float
    standard_error: float = math.nan  # its standard error; `nan` with too few replicates
    degrees: float = 0.0  # degrees of freedom of the t distribution; 0 without a standard error

    @classmethod
    def of_mean(cls, values: FloatArray) -> Self:
        """The mean of independent values; `nan` without values."""
        if not len(values):
            return cls(math.nan)
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), error, len(values) - 1.0)

    def interval(self, level: float = 0.95) -> Interval | None:
        """The t interval; None without a standard error."""
        if not self.degrees > 0:
            return None
        half = float(stats.t.ppf(0.5 + level / 2, self.degrees)) * self.standard_error
        return Interval(self.value - half, self.value + half, level)

    def widened(self, variance: float) -> Self:
        """The same with an independent variance added to that of its error."""
        return replace(self, standard_error=math.hypot(self.standard_error, math.sqrt(variance)))

    @property
    def p_value(self) -> float:
        """The two-sided p-value of a t test of no difference; `nan` without a standard error."""
        if not self.degrees > 0:
            return math.nan
        if self.standard_error == 0:
            return 0.0 if self.value else 1.0
        return float(2 * stats.t.sf(abs(self.value) / self.standard_error, self.degrees))


@functools.cache
def detectable(units: int, level: float, least: float, pilot: float) -> float | None:
    """The difference, in standard errors of a mean, that its test detects with 80 % power; None if none is.

    The power is that of a t test at the largest p-value at or below the level that the test can attain, as a
    mean over what the true standard error may be: that of a pilot is as often too small as too large, and
    taken as known it promises .8 for a power of .73. A test that rejects at its smallest p-value only, needs
    all differences of one sign.

    Args:
        units: Number of independent normal differences.
        level: Two-sided level.
        least: The smallest p-value of the test, of which others are multiples; 0 for a t test.
        pilot: Degrees of freedom of the standard error; infinite if it is known.

    Example:
        >>> [round(detectable(10, 0.05, 0.0, pilot), 3) for pilot in (math.inf, 9)]
        [3.149, 3.464]
        >>> detectable(5, 0.05, 2 / 2**5, math.inf)
    """
    steps = math.floor(level / least * (1 + 1e-9)) if least > 0 else math.inf
    if units < 2 or steps == 0:
        return None
    quantiles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    scales = np.ones(1) if math.isinf(pilot) else np.sqrt(stats.chi2.ppf(quantiles, pilot) / pilot)
    errors = np.sqrt(stats.chi2.ppf(quantiles, units - 1) / (units - 1))
    critical = stats.t.ppf(1 - min(level, steps * least or level) / 2, units - 1) * errors

    def lacks(effect: float) -> float:
        means = effect * scales[:, None]
        if steps == 1:
            shifts = means / math.sqrt(units)
            power = stats.norm.cdf(shifts) ** units + stats.norm.sf(shifts) ** units
        else:
            power = stats.norm.sf(critical - means) + stats.norm.cdf(-critical - means)
        return POWER - float(power.mean())

    return (
        float(optimize.brentq(lacks, 0.0, _MOST_ERRORS, xtol=1e-6)) if lacks(_MOST_ERRORS) < 0 else math.inf
    )


def log_ratio(sums: FloatArray, left_out: FloatArray) -> Estimate:
    """The log of the ratio of two sums, with its jackknife standard error.

    Args:
        sums: The two sums.
        left_out: The sums without each of their n terms, shape [2, n].

    Returns:
        The estimate; `nan` if a sum is 0 without one of its terms.
    """
    if not (left_out > 0).all():
        return Estimate(math.nan)
    count, logs = left_out.shape[1], np.log(left_out[0] / left_out[1])
    deviations = logs - logs.mean()
    error = math.sqrt((count - 1) / count * float(deviations @ deviations))
    return Estimate(float(np.log(sums[0] / sums[1])), error, count - 1.0)


def stratified_mean(values: FloatArray, weights: FloatArray, strata: IntArray) -> Estimate:
    """Weighted mean of independent values whose variance may differ between strata.

    The variance of each stratum's mean is estimated separately; the degrees of freedom are those of Welch and
    Satterthwaite.

    Args:
        values: Values, shape [P].
        weights: Positive weights, constant within a stratum, shape [P]; scaled to sum to 1.
        strata: Stratum of each value, shape [P].

    Returns:
        The estimate; without a standard error if a stratum has fewer than two values.
    """
    if not len(values):
        return Estimate(math.nan)
    weights = weights / weights.sum()
    masks = [strata == stratum for stratum in np.unique(strata)]
    mean = weighted_sum([(weights[mask].sum(), Estimate.of_mean(values[mask])) for mask in masks])
    return replace(mean, value=float(weights @ values))  # in one sum, whose last digits are published


def weighted_sum(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The sum of independent estimates, each times its weight, with Satterthwaite's degrees of freedom.

    Weights of 1 and -1 give Welch's difference of two means.

    Returns:
        The estimate; without a standard error if a part has none.

    Example:
        >>> ours, theirs = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 4.0, 2.0])
        >>> found = weighted_sum([(1.0, Estimate.of_mean(ours)), (-1.0, Estimate.of_mean(theirs))])
        >>> round(found.value, 3), round(found.p_value, 3)
        (0.0, 1.0)
    """
    value = float(sum(weight * part.value for weight, part in parts))
    if not all(part.degrees > 0 for _, part in parts):
        return Estimate(value)
    variances = [(weight * part.standard_error) ** 2 for weight, part in parts]
    shrink = sum(variance**2 / part.degrees for variance, (_, part) in zip(variances, parts, strict=True))
    degrees = sum(variances) ** 2 / shrink if shrink > 0 else sum(part.degrees for _, part in parts)
    return Estimate(value, math.sqrt(sum(variances)), float(degrees))


def clustered_mean(values: FloatArray, weights: FloatArray, clusters: IntArray) -> Estimate:
    """Weighted mean of values that are independent only between S clusters (replicates).

    It has S - 1 degrees of freedom, and no standard error if S < 2; arguments as of `stratified_mean`.
    """
    if not len(values):
        return Estimate(math.nan)
    weights = weights / weights.sum()
    value = float(weights @ values)
    _, cluster = np.unique(clusters, return_inverse=True)
    sums = np.array(np.bincount(cluster, weights * (values - value)), dtype=np.float64)
    return replace(Estimate.of_mean(len(sums) * sums), value=value)
