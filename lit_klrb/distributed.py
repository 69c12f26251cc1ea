"""Training in several processes (DDP): what has to be put together, because it couples sequences.

Every process has its own prompts; the score weights of a rollout are those of all of them. Evaluation is the
same in every process, on all prompts: its numbers are those of one process, without any reduction.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, distributed
from torch.nn.functional import pad

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TokenStats

T = TypeVar("T")


def world_size() -> int:
    """How many processes train together."""
    initialised = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialised else 1


def gather(value: T) -> list[T]:
    """The value of every process in the order of their ranks; tensors arrive on the CPU they left from.

    Args:
        value: Anything that can be pickled; the same call must be made by all processes.

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
    """Rows of all parts, [sum of B, longest T], filled with zeros on the right.

    Example:
        >>> stacked([torch.tensor([[1, 2]]), torch.tensor([[3]])]).tolist()
        [[1, 2], [3, 0]]
    """
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def stacked_stats(parts: Sequence[TokenStats]) -> TokenStats:
    """Statistics of all parts; a field that the first part lacks is None."""
    fields: list[Any] = [None if field[0] is None else stacked(field) for field in zip(*parts, strict=True)]
    return TokenStats(*fields)


def gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all processes, those of rank 0 first.

    Args:
        tensor: Shape [B] or [B, T]. All processes have the same B; rows of a smaller T are filled with zeros.

    Example:
        >>> gather_rows(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if world_size() == 1:
        return tensor
    parts = gather(tensor.cpu())
    return (torch.cat(parts) if tensor.ndim == 1 else stacked(parts)).to(tensor.device)


def gather_rollout(stats: TokenStats, mask: Tensor, rewards: Tensor) -> tuple[TokenStats, Tensor, Tensor]:
    """The same of the completions of all processes.

    Args:
        stats: Statistics of every token, [B, T].
        mask: Completion tokens, [B, T].
        rewards: One number per completion, [B].
    """
    fields: list[Any] = [None if field is None else gather_rows(field) for field in stats]
    return TokenStats(*fields), gather_rows(mask), gather_rows(rewards)


def own_rows(gathered: Tensor, like: Tensor) -> Tensor:
    """This process's part of what was computed on gathered rows.

    Args:
        gathered: Shape [processes * B, longest T].
        like: A tensor of this process before it was gathered, shape [B, T].

    Example:
        >>> own_rows(torch.tensor([[1, 2, 3]]), like=torch.zeros(1, 2)).tolist()
        [[1, 2]]
    """
    count, width = like.shape
    first = distributed.get_rank() * count if world_size() > 1 else 0
    return gathered[first : first + count, :width]


def check_strategy(trainer: L.Trainer) -> None:
    """Refuse what would shard the policy: sampling and the tiled loss read its weights whole.

    Raises:
        ConfigurationError: Naming the strategy.
    """
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ConfigurationError(
            f"trainer.strategy: {type(trainer.strategy).__name__} is not supported, as sampling and the "
            "tiled loss read the policy's weights whole; use ddp, or one device"
        )
