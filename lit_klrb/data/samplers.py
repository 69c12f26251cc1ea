"""Batches as a function of (seed, step), so that a resumed run continues with the same batches."""

from collections.abc import Iterator
from itertools import count

import torch
from torch.utils.data import Sampler

from lit_klrb.errors import check_at_least
from lit_klrb.seeding import derive_seed


class StepBatchSampler(Sampler[list[int]]):
    """Infinite batches of indices; batch n depends on (seed, n) only.

    Each epoch is a new permutation of the data. A batch may span two epochs, so no example is dropped.

    Args:
        size: Number of examples.
        batch_size: Examples per batch.
        seed: Seed of the order.
        start: Number of the first batch to yield: the step from which a run resumes.
        repeat: How many times in a row each batch is yielded, for several training steps per rollout.
        rank: Rank of this process. The processes' batches are parts of the batch that a single process with a
            batch size world_size times as large would yield.
        world_size: Number of processes.

    Example:
        >>> batches = iter(StepBatchSampler(size=5, batch_size=2, seed=0))
        >>> first = [next(batches) for _ in range(4)]
        >>> resumed = iter(StepBatchSampler(size=5, batch_size=2, seed=0, start=2))
        >>> next(resumed) == first[2]
        True
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        start: int = 0,
        repeat: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_at_least(1, size=size, batch_size=batch_size, repeat=repeat, world_size=world_size)
        self.size, self.batch_size, self.seed, self.start, self.repeat = size, batch_size, seed, start, repeat
        self.rank, self.world_size = rank, world_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def batch(self, number: int) -> list[int]:
        """The indices of batch `number`."""
        first = (number // self.repeat * self.world_size + self.rank) * self.batch_size
        return [self._index(position) for position in range(first, first + self.batch_size)]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            self._epoch, self._order = epoch, torch.randperm(self.size, generator=generator)
        return int(self._order[offset])

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.batch, count(self.start))
