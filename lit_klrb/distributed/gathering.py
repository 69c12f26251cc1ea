"""Gathering the quantities that couple sequences.

Every process has its own prompts, and score weights are computed on the rollouts of all processes. Each
samples its slice of an evaluation and has the completions of all, so metrics need no reduction.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from lit_klrb.functional import TokenStats

T = TypeVar("T")


# What ends a process that waits for another one.
LOST = "another process of this run has ended, or does not answer"


def world_size() -> int:
    """The number of processes that train together."""
    initialised = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialised else 1


def is_lost(error: BaseException) -> bool:
    """Whether an operation failed as another process has ended or does not answer.

    The errors of gloo have no class of their own, but begin with the place in its source.
    """
    in_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return world_size() > 1 and (in_gloo or isinstance(error, distributed.DistError))


def gather(value: T) -> list[T]:
    """The values of all processes, in the order of their ranks.

    Args:
        value: Any value that can be pickled, tensors on the CPU; all processes must make this call.

    Example:
        >>> gather(3)
        [3]
    """
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    distributed.all_gather_object(parts, value)
    return parts


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all parts, padded with zeros to shape [sum of B, longest T].

    Example:
        >>> stacked([torch.tensor([[1, 2]]), torch.tensor([[3]])]).tolist()
        [[1, 2], [3, 0]]
    """
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def stacked_stats(parts: Sequence[TokenStats]) -> TokenStats:
    """Concatenate the statistics of all parts; fields that are None in the first part remain None."""
    fields: list[Any] = [None if field[0] is None else stacked(field) for field in zip(*parts, strict=True)]
    return TokenStats(*fields)


def gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks.

    Args:
        tensor: Shape [B] or [B, T]; smaller T are padded with zeros.

    Example:
        >>> gather_rows(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if world_size() == 1:
        return tensor
    parts = gather(tensor.cpu())
    return (torch.cat(parts) if tensor.ndim == 1 else stacked(parts)).to(tensor.device)


def own_rows(gathered: Tensor, like: Tensor) -> Tensor:
    """This process's rows of a tensor computed on gathered rows, of which each process has as many.

    Example:
        >>> own_rows(torch.tensor([[1, 2, 3]]), like=torch.zeros(1, 2)).tolist()
        [[1, 2]]
    """
    count, width = like.shape
    first = distributed.get_rank() * count if world_size() > 1 else 0
    return gathered[first : first + count, :width]


def rank_slice(count: int) -> tuple[slice, int]:
    """This process's slice of some rows, and how many of them are for `gather_rows`.

    It has at least one row, which is then not gathered: processes that divide a model run it together.

    Example:
        >>> rank_slice(3)
        (slice(0, 3, None), 3)
    """
    rank, size = (distributed.get_rank(), world_size()) if world_size() > 1 else (0, 1)
    first, last = count * rank // size, count * (rank + 1) // size
    return slice(first, max(last, first + 1)), last - first


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all processes if they hold a part each (a DTensor).

    Example:
        >>> whole(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()
