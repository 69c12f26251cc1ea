"""Matched pairs, the input of every test on (KL, reward) outcomes. NumPy only."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
# Fewest blocks that show how much blocks differ.
FEWEST_BLOCKS = 3


@dataclass(frozen=True, eq=False)
class Pairs:
    """P matched pairs of runs that differ only in their arm.

    Column 0 is the treatment, column 1 the control. A diverged run is included with `nan` outcomes and ranks
    last; a pair that lost a run to a failure of the infrastructure is not included.
    """

    treatment: str  # label of the arm under study
    control: str  # label of the arm it is compared with
    beta: FloatArray  # KL weight of each pair, shape [P]
    beta_index: IntArray  # index of the KL weight, shape [P]; pairs with the same index have the same `beta`
    replicate: IntArray  # replicate of each pair, shape [P]
    unit: IntArray  # swap unit of each pair, shape [P]: pairs of the same unit are swapped together
    kl: FloatArray  # KL(policy || reference) in nats, shape [P, 2]
    reward: FloatArray  # mean reward, shape [P, 2]
    blocks: int = 0  # number of blocks; replicate r belongs to block r mod their number; 0 without blocks
    # What the control's run gained in training, in what decides, shape [P]: J at the end less J at the start,
    # or the KL at the start less that at the end; `nan` where the start is unknown
    gain: FloatArray | None = None
    # Difference in what decides on each prompt of the evaluation, shape [P, prompts]; None if unknown
    prompts: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.beta)

    @property
    def diverged(self) -> BoolArray:
        """Runs without a finite outcome, shape [P, 2]."""
        return ~(np.isfinite(self.kl) & np.isfinite(self.reward))

    @property
    def beta_indices(self) -> IntArray:
        """The distinct indices of KL weights, ascending."""
        return np.unique(self.beta_index)

    @property
    def replicates(self) -> int:
        """Number of distinct replicates, the n of every statement."""
        return len(np.unique(self.replicate))

    @property
    def block(self) -> IntArray:
        """Block of each pair, shape [P]; 0 without blocks."""
        return np.asarray(self.replicate % max(1, self.blocks))

    @property
    def over_blocks(self) -> bool:
        """Whether there are enough blocks to show how much they differ."""
        return len(np.unique(self.block)) >= FEWEST_BLOCKS

    @property
    def seeds_shared(self) -> bool:
        """Whether whole replicates are swapped, as their pairs share seeds across KL weights."""
        return len(np.unique(self.unit)) < len(self)

    @property
    def single(self) -> bool:
        """Whether no two pairs share a beta and a block, or a seed: each is an independent difference."""
        apart = not self.blocks or len(np.unique(self.block)) == len(self)
        return len(self.beta_indices) == 1 and apart and not self.seeds_shared

    @property
    def stratum(self) -> IntArray:
        """Beta of each pair, and its block unless blocks are the unit, as one number, shape [P]."""
        blocks = 0 if self.over_blocks else self.blocks
        return np.asarray(self.beta_index * max(1, blocks) + (self.block if blocks else 0))

    @property
    def finite(self) -> "Pairs":
        """The pairs in which no run diverged, whose differences are values."""
        return self.subset(np.asarray(~self.diverged.any(axis=1)))

    def subset(self, mask: BoolArray) -> "Pairs":
        """The pairs where `mask` [P] is true."""
        names = ("beta", "beta_index", "replicate", "unit", "kl", "reward", "gain", "prompts")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value[mask] for name, value in values.items() if value is not None})
