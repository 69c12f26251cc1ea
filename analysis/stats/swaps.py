"""Exact label-swap tests: the randomisation of a paired design, on scipy's engine."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from analysis.stats.pairs import FloatArray, IntArray

Alternative = Literal["two-sided", "greater", "less"]

RESAMPLES = 9_999
"""Monte-Carlo draws; designs of up to 2**13 swaps are enumerated instead."""

# Sums are compared on a grid of 2**-32 of the largest contribution: swaps that tie in theory tie in the
# computer too (scipy's own tolerance is relative to the observed sum, hence nothing where that is 0).
_GRID_BITS = 32


@dataclass(frozen=True)
class SwapTest:
    """A p-value and what it could have been at best.

    Attributes:
        p_value: P of a statistic at least as extreme under exchangeable labels.
        attainable: Smallest p this test can return for these units: all contributions on one side.
        units: Units whose swap changes the statistic.
        resamples: Swaps looked at: all of them if `exact`, else the number of random draws.
        exact: Whether every swap was enumerated.
    """

    p_value: float
    attainable: float
    units: int
    resamples: int
    exact: bool


def swap_test(
    contributions: FloatArray,
    units: IntArray | None = None,
    *,
    alternative: Alternative = "two-sided",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> SwapTest:
    """Test sum(contributions) = 0 where swapping a pair's labels turns its contribution's sign.

    The null hypothesis is the sharp one: within each unit the two runs' outcomes are exchangeable. With n
    units that matter, all 2**n swaps are enumerated if there are no more than `resamples`; else
    p = (1 + #{null >= observed}) / (1 + resamples), doubled for two sides.

    Args:
        contributions: Antisymmetric contribution of each pair, shape [P]; finite.
        units: Pairs with equal entries are swapped together, shape [P]; by default each on its own.
        alternative: "greater" if large sums speak against the null.
        resamples: Random swaps when enumeration would need more.
        seed: Seed of the random swaps.

    Returns:
        The test, conditional on the units that contribute nothing.

    Raises:
        ValueError: If a contribution is not finite.

    Example:
        >>> swap_test(np.array([1.0, 2.0, 3.0, 4.0, 5.0])).p_value  # 2 of 32 swaps
        0.0625
    """
    if not np.isfinite(contributions).all():
        raise ValueError("contributions must be finite: count diverged runs as worst before testing")
    units = np.arange(len(contributions)) if units is None else units
    sums = np.array([contributions[units == unit].sum() for unit in np.unique(units)])
    _, exponent = np.frexp(np.abs(contributions).max(initial=0.0))

    def on_grid(values: FloatArray) -> FloatArray:
        return np.asarray(np.rint(np.ldexp(values, _GRID_BITS - exponent)))

    sums = sums[on_grid(sums) != 0]
    steps = np.unique(np.abs(on_grid(sums)))
    count, sides = len(sums), 2 if alternative == "two-sided" else 1
    if len(steps) == 1:  # a sign test
        p_value = stats.binomtest(int((sums > 0).sum()), count, alternative=alternative).pvalue
        return SwapTest(float(p_value), min(1.0, sides * 2.0**-count), count, 2**count, True)
    exact = 2.0**count <= resamples
    result = stats.permutation_test(
        (np.pad(sums, (0, max(0, 2 - count))),),  # scipy wants two observations; a zero changes nothing
        lambda flipped, axis: on_grid(flipped.sum(axis)),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        alternative=alternative,
        rng=np.random.default_rng(seed),
    )
    floor = 2.0**-count if exact else 1 / (resamples + 1)
    drawn = 2**count if exact else resamples
    return SwapTest(min(1.0, float(result.pvalue)), min(1.0, sides * floor), count, drawn, exact)
