"""Power: what a design detects, and how often its test errs off the normal."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.stats.intervals import detectable
from analysis.stats.pairs import FEWEST_BLOCKS, FloatArray
from analysis.stats.swaps import TIE, swap_signs, upper_p

# Number of simulated sweeps.
SWEEPS = 4_000
# The largest design that is looked at, in blocks, or in replicates of each.
_MOST = 1_000


@dataclass(frozen=True)
class Design:
    """A planned comparison of two arms, by S replicates at each of several betas, which may be in blocks."""

    betas: int  # number of KL weights
    replicates: int  # matched pairs at each
    blocks: int = 0  # number of blocks of the replicates, 0 without
    level: float = 0.05  # the two-sided level of the comparison

    @property
    def over_blocks(self) -> bool:
        """Whether blocks are the units."""
        return self.blocks >= FEWEST_BLOCKS

    @property
    def single(self) -> bool:
        """Whether each unit is one difference, as `Pairs.single`."""
        return self.betas == 1 and self.blocks in (0, self.replicates)

    @property
    def units(self) -> int:
        """Number of independent values: blocks, or pairs."""
        return self.blocks if self.over_blocks else self.betas * self.replicates

    @property
    def by_t(self) -> bool:
        """Whether the t test of the units decides, and not swaps."""
        return self.over_blocks or self.single

    def reach(self, pilot: float = math.inf) -> float | None:
        """The smallest difference that it detects, see `detectable`.

        Args:
            pilot: Degrees of freedom of the standard error; infinite if it is known.

        Example:
            >>> round(Design(1, 10).reach(), 3), Design(3, 1).reach()
            (3.149, None)
        """
        return detectable(self.units, self.level, 0.0 if self.by_t else 2.0 ** (1 - self.units), pilot)

    def grown(self, enough: Callable[["Design"], bool]) -> "Design | None":
        """The smallest design of this kind that is enough: with more replicates, or with more blocks.

        Blocks keep their number of replicates where they are the units. None if a thousand units do not do.
        """
        each = self.replicates // self.blocks if self.over_blocks else max(1, self.blocks)
        sizes = [
            replace(self, replicates=each * n, blocks=n if self.over_blocks else self.blocks)
            for n in range(FEWEST_BLOCKS if self.over_blocks else 1, _MOST + 1)
        ]
        index = bisect_left(sizes, True, key=enough)  # power increases with their size
        return sizes[index] if index < len(sizes) else None


def swap_p_values(sums: FloatArray, *, resamples: int = 999) -> FloatArray:
    """p-values of many swap tests with the same number of units, for simulations; see `mean_swap_test`.

    Args:
        sums: Contributions of each unit, shape [sweeps, units].
        resamples: Number of random swaps; all swaps are enumerated if there are no more.
    """
    units = sums.shape[1]
    signs, exact = swap_signs(units, resamples)
    # Random swaps are independent between sweeps
    turned = sums if exact else sums * np.random.default_rng([0, 1]).choice((-1.0, 1.0), size=sums.shape)
    tolerance = np.abs(sums).max(axis=1, initial=0.0) * TIE
    observed, null = sums.sum(axis=1), signs @ turned.T
    upper, lower = (upper_p(s * observed, s * null, exact=exact, tolerance=tolerance) for s in (1.0, -1.0))
    return np.asarray(np.minimum(1.0, 2 * np.minimum(upper, lower)))


# Differences with mean 0, in simulations: name -> draws of a shape.
_COLLAPSES = 0.1
NULLS: dict[str, Callable[[np.random.Generator, tuple[int, int]], FloatArray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "log-normal": lambda rng, shape: np.exp(rng.normal(size=shape)) - np.exp(0.5),
    "collapses": lambda rng, shape: (
        0.8 + 0.5 * rng.normal(size=shape) - 0.8 / _COLLAPSES * (rng.random(shape) < _COLLAPSES)
    ),
}
"""The third is a gain that is lost by one unit in ten, which collapses."""


def rejections(units: int, level: float, *, by_t: bool) -> dict[str, tuple[float, float]]:
    """Shares of simulated sweeps without a mean difference in which a test says better, and worse.

    Args:
        units: Number of independent differences.
        level: Level of the test.
        by_t: Whether it is the t test of their mean, or that by swaps.

    Returns:
        Name of the distribution of a difference -> the two shares.
    """
    rates = {}
    for name, draw in NULLS.items():
        values = draw(np.random.default_rng(units), (SWEEPS, units))
        p_values = stats.ttest_1samp(values, 0.0, axis=1).pvalue if by_t else swap_p_values(values)
        rejected, up = p_values <= level, values.sum(axis=1) > 0
        rates[name] = float((rejected & up).mean()), float((rejected & ~up).mean())
    return rates
