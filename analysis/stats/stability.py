"""Stability of training: spread between replicates along a curve, and roughness within runs.

Curves are of the reward or of the *log* of the KL: the spread of a KL increases with its level, so that runs
closer to the reference would otherwise appear more stable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.stats.inversion import ratio_swap_test
from analysis.stats.pairs import FloatArray, IntArray
from analysis.stats.swaps import RESAMPLES, SwapTest, sign_flip_test


@dataclass(frozen=True, eq=False)
class SpreadTest:
    """Log ratio of the two estimators' spread between replicates, treatment over control.

    Attributes:
        curve: L_t = log sum |r_treatment| - log sum |r_control|, shape [T]; negative where the treatment has
            less spread.
        pointwise: The swap test of max |L_t|, simultaneous over all steps.
        ratio: Log ratio of the spreads over all steps, in each of which the spread of both estimators is 1.
        integrated: The swap test of that ratio, with its interval.
    """

    curve: FloatArray
    pointwise: SwapTest
    ratio: float
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
    names = np.unique(units)
    sizes = _absolute_residuals(values, beta_index)
    total = sizes.sum(axis=(0, 1))
    sizes, total = sizes[..., total > 0], total[total > 0]
    leaning = np.stack([(sizes[units == name, 0] - sizes[units == name, 1]).sum(axis=0) for name in names])

    def curve(signs: FloatArray) -> FloatArray:
        return _log_ratio(signs @ leaning, total)

    def largest(signs: FloatArray) -> FloatArray:
        return np.asarray(np.abs(curve(signs)).max(axis=-1, initial=0.0))

    observed = curve(np.ones(len(names)))
    ours, theirs = (sizes / total).sum(axis=-1).T
    ratio, integrated = ratio_swap_test(ours, theirs, units, resamples=resamples)
    return SpreadTest(
        observed,
        sign_flip_test(len(names), largest, alternative="greater", resamples=resamples),
        ratio,
        integrated,
    )


def roughness_contributions(values: FloatArray, beta_index: IntArray) -> FloatArray:
    """Difference in the log mean squared increment around the mean curve, treatment minus control.

    This is the roughness within runs, as opposed to the spread between runs.

    Args:
        values: Outcome of each pair's treatment and control at each step, shape [P, 2, T].
        beta_index: Index of the KL weight of each pair, shape [P].

    Returns:
        Swap contributions, shape [P]; negative where the treatment's run is smoother.
    """
    squared = (np.diff(_centred(values, beta_index, np.mean), axis=-1) ** 2).mean(axis=-1)
    logs = np.log(np.maximum(squared, np.finfo(float).tiny))
    return np.asarray(logs[:, 0] - logs[:, 1])


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
