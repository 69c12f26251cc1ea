"""The t test of a mean, most often over blocks.

Replicates of one warm start say nothing about others. With blocks, such as several warm starts, the unit of
a statement about others like them is the block, not the pair. Swapping the signs of B block means gives
p-values of at least 2 ** (1 - B), .25 for three blocks, so that the test is that of a mean of B values. It is
about the mean of blocks like these, and no test can see what is too rare to be among them (`most_unseen`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray

# Blocks' differences with mean 0, in simulations: name -> draws of a shape.
_COLLAPSES = 0.1
NULLS: dict[str, Callable[[np.random.Generator, tuple[int, int]], FloatArray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "t with 3 degrees of freedom": lambda rng, shape: rng.standard_t(3, size=shape),
    "normal, SDs from .3 to 2": lambda rng, shape: rng.normal(size=shape) * np.linspace(0.3, 2, shape[1]),
    "log-normal": lambda rng, shape: np.exp(rng.normal(size=shape)) - np.exp(0.5),
    "a gain that 10 % of the blocks lose by collapsing": lambda rng, shape: (
        0.8 + 0.5 * rng.normal(size=shape) - 0.8 / _COLLAPSES * (rng.random(shape) < _COLLAPSES)
    ),
}


@dataclass(frozen=True)
class TTest:
    """The two-sided t test of a mean.

    Attributes:
        p_value: Its p-value.
        blocks: Number of blocks, if it is over blocks; 0 otherwise.
        attainable: The smallest p-value that it can attain.
    """

    p_value: float
    blocks: int = 0
    attainable: float = 0.0

    @classmethod
    def over_blocks(cls, estimate: Estimate) -> Self:
        """The test of a mean of block means.

        Example:
            >>> round(TTest.over_blocks(Estimate.of_mean(np.array([1.0, 2.0, 3.0]))).p_value, 4)
            0.0742
        """
        return cls(estimate.p_value, round(estimate.degrees) + 1)


def most_unseen(blocks: int) -> float:
    """The largest share of blocks that collapse, if none of some does: Clopper and Pearson's 95% bound.

    Example:
        >>> round(most_unseen(8), 3)
        0.369
    """
    return float(stats.binomtest(0, blocks).proportion_ci(0.95, "exact").high)


def rejections(blocks: int, level: float, sweeps: int = 4_000) -> dict[str, tuple[float, float]]:
    """Shares of simulated sweeps without a mean difference in which the t test says better, and worse.

    Args:
        blocks: Number of blocks.
        level: Level of the test.
        sweeps: Number of simulated sweeps.

    Returns:
        Name of the distribution of a block's difference -> the two shares.
    """
    found = {}
    for name, draw in NULLS.items():
        means = draw(np.random.default_rng(blocks), (sweeps, blocks))
        statistic, p_values = stats.ttest_1samp(means, 0.0, axis=1)
        found[name] = (
            float(((p_values <= level) & (statistic > 0)).mean()),
            float(((p_values <= level) & (statistic < 0)).mean()),
        )
    return found
