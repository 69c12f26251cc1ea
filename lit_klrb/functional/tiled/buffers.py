"""Memory for the logits of a tile and the head weights of a block, which successive calls reuse on a CPU."""

import threading

import torch
from torch import Tensor

# Memory on a CPU by name and dtype, `buffers`, which successive calls of a thread reuse
_WORKSPACE = threading.local()


def take(name: str, like: Tensor, count: int) -> Tensor:
    """`count` elements with the dtype and device of `like`; on a CPU, the next call of the name reuses them.

    On a CPU, large blocks of memory return to the operating system when they are freed, and the next
    allocation has its pages zeroed again: about 4 % of the operation's time. On a GPU torch caches memory.
    """
    if like.device.type != "cpu":
        return like.new_empty(count)
    buffers: dict[tuple[str, torch.dtype], Tensor] = vars(_WORKSPACE).setdefault("buffers", {})
    key = name, like.dtype
    if key not in buffers or len(buffers[key]) < count:
        buffers.pop(key, None)  # free the old buffer before the larger one is allocated
        # Under inference_mode this would be an inference tensor, which cannot be written to outside it
        with torch.inference_mode(False):
            buffers[key] = torch.empty(count, dtype=like.dtype)
    return buffers[key][:count]


class Buffers:
    """Memory for the logits of a tile and the head weights of a block; on a CPU one set per thread.

    Args:
        like: A tensor with the dtype and device of the buffers.
        rows: Number of rows of the largest tile.
        columns: Number of columns of the widest block.
        retained: Number of columns for which a tile's reference logits and masses are retained; by default
            each block overwrites those of the previous one.
        shared: Whether retained blocks lie in the memory that the next buffers use.
        retain_reference: Whether the reference's logits are among what is retained.
    """

    def __init__(
        self,
        like: Tensor,
        rows: int,
        columns: int,
        retained: int | None = None,
        shared: bool = True,
        retain_reference: bool = True,
    ) -> None:
        self._retains_blocks, self._retains_reference = retained is not None, retain_reference
        self._logits = take("logits", like, rows * columns)
        widths = {"ref_logits": retained if retain_reference else None, "masses": retained}
        self._ref_logits, self._masses = (
            take(n, like, rows * (w or columns)) if shared or w is None else like.new_empty(rows * w)
            for n, w in widths.items()
        )
        self._columns = columns
        self._weight: Tensor | None = None

    def block(self, rows: int, block: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, reference logits and masses, shape [rows, block]; all blocks share the logits' memory."""
        # Retained blocks lie one after the other, each contiguous; others all start at 0
        count, first = block.stop - block.start, block.start if self._retains_blocks else 0
        scratch, own = slice(0, rows * count), slice(rows * first, rows * (first + count))
        reference = self._ref_logits[own if self._retains_reference else scratch]
        flat = self._logits[scratch], reference, self._masses[own]
        logits, ref_logits, masses = (part.view(rows, count) for part in flat)
        return logits, ref_logits, masses

    def precise(self, weight: Tensor) -> Tensor:
        """A block of head weights in the dtype of the logits; a copy is overwritten by the next call."""
        if weight.dtype == self._logits.dtype:
            return weight
        if self._weight is None or self._weight.shape[1] != weight.shape[1]:
            memory = take("weight", self._logits, self._columns * weight.shape[1])
            self._weight = memory.view(self._columns, weight.shape[1])
        return self._weight[: len(weight)].copy_(weight)
