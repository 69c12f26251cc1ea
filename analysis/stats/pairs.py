"""Matched pairs, the input of every test on (KL, reward) outcomes, and their curves. NumPy only."""

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
    # For each block of the plan, the first one that is the same: two whose runs start from the same weights
    # are one. Replicate r belongs to block r mod their number; empty without blocks.
    blocks: tuple[int, ...] = ()

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
        blocks = np.array(self.blocks or (0,))
        return np.asarray(blocks[self.replicate % len(blocks)])

    @property
    def over_blocks(self) -> bool:
        """Whether there are enough different blocks to show how much they differ."""
        return len(np.unique(self.block)) >= FEWEST_BLOCKS

    @property
    def seeds_shared(self) -> bool:
        """Whether whole replicates are swapped, as their pairs share seeds across KL weights."""
        return len(np.unique(self.unit)) < len(self)

    def worst_filled(self) -> tuple[FloatArray, FloatArray]:
        """`(kl, reward)`; diverged runs are (inf, -inf): dominated by all others, tied with each other."""
        gone = self.diverged
        return np.where(gone, np.inf, self.kl), np.where(gone, -np.inf, self.reward)

    @property
    def finite(self) -> "Pairs":
        """The pairs in which no run diverged, whose differences are values."""
        return self.subset(np.asarray(~self.diverged.any(axis=1)))

    def subset(self, mask: BoolArray) -> "Pairs":
        """The pairs where `mask` [P] is true."""
        names = ("beta", "beta_index", "replicate", "unit", "kl", "reward")
        return replace(self, **{name: getattr(self, name)[mask] for name in names})


@dataclass(frozen=True, eq=False)
class Curves:
    """One metric of matched pairs over training."""

    metric: str  # "reward", "kl", or "objective"
    pairs: Pairs  # the pairs in which both runs have the curve and neither diverged
    steps: FloatArray  # the steps that all curves have, ascending, shape [T]
    # The metric of treatment and control, shape [P, 2, T]; the *log* of the KL where the spread between
    # replicates is compared
    values: FloatArray
