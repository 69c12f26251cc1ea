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

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The value of every process in the order of their ranks; tensors arrive on the CPU they left from.

    Args:
        value: Anything that can be pickled; the same call must be made by all processes.

    Example:
        >>> gather(3)
        [3]
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    parts: list[Any] = [None] * distributed.get_world_size()
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
