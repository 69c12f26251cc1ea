"""The t test over blocks.

Replicates of one warm start say nothing about others. With blocks, such as several warm starts, the unit of
a statement about others like them is the block, not the pair. Swapping the signs of B block means gives
p-values of at least 2 ** (1 - B), .25 for three blocks, so that the test is that of a mean of B values.
"""

from dataclasses import dataclass
from typing import Self

from analysis.stats.intervals import Estimate


@dataclass(frozen=True)
class BlockTest:
    """The two-sided t test of the mean of block means.

    Attributes:
        p_value: Its p-value.
        blocks: Number of blocks.
        attainable: The smallest p-value that it can attain.
    """

    p_value: float
    blocks: int
    attainable: float = 0.0

    @classmethod
    def of(cls, estimate: Estimate) -> Self:
        """The test of a mean of block means.

        Example:
            >>> import numpy as np
            >>> round(BlockTest.of(Estimate.of_mean(np.array([1.0, 2.0, 3.0]))).p_value, 4)
            0.0742
        """
        return cls(estimate.p_value, round(estimate.degrees) + 1)
