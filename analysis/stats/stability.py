"""Stability of training: spread between replicates along a curve, and roughness within runs.

Curves are of the reward or of the *log* of the KL: the spread of a KL increases with its level, so that runs
closer to the reference would otherwise appear more stable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.stats.intervals import Estimate, jackknife_error
from analysis.stats.pairs import FloatArray, IntArray
from analysis.stats.swaps import RESAMPLES, SwapTest, sign_flip_test, swap_test


@dataclass(frozen=True, eq=False)
class SpreadTest:
    """Log ratio of the two estimators' spread between replicates, control over treatment.

    Attributes:
        curve: L_t = log sum |r_control| - log sum |r_treatment|, shape [T]; positive where the treatment
            has less spread.
        pointwise: The swap test of max |L_t|, simultaneous over all steps.
        mean: Mean of L_t, with a jackknife standard error over units.
        integrated: The swap test of the mean.
    """

    curve: FloatArray
    pointwise: SwapTest
    mean: Estimate
    integrated: SwapTest


def spread_test(
    values: FloatArray, beta_index: IntArray, units: IntArray, *, resamples: int = RESAMPLES
) -> SpreadTest:
    """Compare the spread between replicates at all steps and on average.

    Residuals are deviations from the median of each arm, beta and step, so that the arms' mean curves have no
    effect. Swaps exchange residuals within pairs without recomputing them. With absolute values and medians
    the test keeps its level under heavy tails, which it does not with squares and means.

    Args:
        values: Outcome of each pair's treatment and control at each step, shape [P, 2, T], finite; several
            metrics may be concatenated.
        beta_index: Index of the KL weight of each pair, shape [P].
        units: Pairs with equal entries are swapped together, shape [P].
        resamples: Number of random swaps if enumeration would need more.

    Raises:
        ValueError: If a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("values must be finite: leave out pairs with a diverged run")
    names, place = np.unique(units, return_inverse=True)
    sizes = _absolute_residuals(values, beta_index)
    total = sizes.sum(axis=(0, 1))
    sizes, total = sizes[..., total > 0], total[total > 0]
    leaning = np.stack([(sizes[units == name, 1] - sizes[units == name, 0]).sum(axis=0) for name in names])

    def curve(signs: FloatArray) -> FloatArray:
        return _log_ratio(signs @ leaning, total)

    def largest(signs: FloatArray) -> FloatArray:
        return np.asarray(np.abs(curve(signs)).max(axis=-1, initial=0.0))

    def average(signs: FloatArray) -> FloatArray:
        return np.asarray(curve(signs).mean(axis=-1) if len(total) else np.zeros(signs.shape[:-1]))

    observed = curve(np.ones(len(names)))
    left_out = _means_without(values, beta_index, place)
    return SpreadTest(
        observed,
        sign_flip_test(len(names), largest, alternative="greater", resamples=resamples),
        _jackknife(float(average(np.ones(len(names)))), left_out),
        sign_flip_test(len(names), average, resamples=resamples),
    )


def roughness_contributions(values: FloatArray, beta_index: IntArray) -> FloatArray:
    """Difference in the log mean squared increment around the mean curve, control minus treatment.

    This is the roughness within runs, as opposed to the spread between runs.

    Args:
        values: Outcome of each pair's treatment and control at each step, shape [P, 2, T].
        beta_index: Index of the KL weight of each pair, shape [P].

    Returns:
        Swap contributions, shape [P]; positive where the treatment's run is smoother.
    """
    squared = (np.diff(_centred(values, beta_index, np.mean), axis=-1) ** 2).mean(axis=-1)
    logs = np.log(np.maximum(squared, np.finfo(float).tiny))
    return np.asarray(logs[:, 1] - logs[:, 0])


def roughness_test(values: FloatArray, beta_index: IntArray, units: IntArray) -> tuple[Estimate, SwapTest]:
    """Mean of `roughness_contributions` over pairs, and its swap test."""
    contributions = roughness_contributions(values, beta_index)
    return Estimate.of_mean(contributions), swap_test(contributions, units)


def _absolute_residuals(values: FloatArray, beta_index: IntArray) -> FloatArray:
    return np.abs(_centred(values, beta_index, np.median))


def _centred(values: FloatArray, beta_index: IntArray, centre: Callable[..., Any]) -> FloatArray:
    """The values minus the mean or median of their arm, beta and step."""
    found = values.copy()
    for index in np.unique(beta_index):
        found[beta_index == index] -= centre(values[beta_index == index], axis=0)
    return found


def _log_ratio(leaning: FloatArray, total: FloatArray) -> FloatArray:
    """log(total + leaning) - log(total - leaning); a side without spread is set to 1e-12 of the total."""
    floor = 1e-12 * total
    return np.asarray(np.log(np.maximum(total + leaning, floor)) - np.log(np.maximum(total - leaning, floor)))


def _means_without(values: FloatArray, beta_index: IntArray, place: IntArray) -> FloatArray:
    """The mean of the curve without each unit, shape [units]; only sums at the unit's own betas change."""
    at = {index: beta_index == index for index in np.unique(beta_index)}
    whole = {index: _spread(values[mine]) for index, mine in at.items()}
    found = []
    for unit in range(int(place.max()) + 1):
        own = np.unique(beta_index[place == unit])
        left = {index: _spread(values[at[index] & (place != unit)]) for index in own}
        total, leaning = np.sum([*{**whole, **left}.values()], axis=0)
        ratios = _log_ratio(leaning[total > 0], total[total > 0])
        found.append(float(ratios.mean()) if len(ratios) else 0.0)
    return np.array(found)


def _spread(values: FloatArray) -> FloatArray:
    """Summed absolute residuals of runs at one beta: of both arms, and control less treatment; [2, T]."""
    if not len(values):
        return np.zeros((2, values.shape[-1]))
    sizes = np.abs(values - np.median(values, axis=0))
    return np.stack([sizes.sum(axis=(0, 1)), (sizes[:, 1] - sizes[:, 0]).sum(axis=0)])


def _jackknife(value: float, left_out: FloatArray) -> Estimate:
    count = len(left_out)
    if count < 3 or not np.isfinite(left_out).all():
        return Estimate(value)
    return Estimate(value, jackknife_error(left_out), count - 1.0)
