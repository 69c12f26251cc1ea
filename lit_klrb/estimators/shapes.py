"""The shapes of a rollout, checked."""

import math

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.logprobs import TokenStats


def check_rollout(
    stats: TokenStats,
    mask: Tensor,
    *,
    rewards: Tensor | None = None,
    beta: float = 1.0,
    **tokenwise: Tensor | None,
) -> None:
    """Check the shapes of a rollout, which would otherwise be broadcast to another gradient, and beta.

    Raises:
        ConfigurationError: If the mask is not a boolean matrix, rewards are not one per sequence, anything
            else is not of the mask's shape, or beta is negative or not finite; names it.
    """
    if mask.ndim != 2 or mask.dtype is not torch.bool:
        got = f"{mask.dtype} of shape {[*mask.shape]}"
        raise ConfigurationError(f"must be torch.bool of shape [B, T], got {got}", key="mask")
    tokenwise |= {f"stats.{name}": field for name, field in stats._asdict().items()}
    for name, field in tokenwise.items():
        if field is not None and field.shape != mask.shape:
            raise ConfigurationError(
                f"must have the mask's shape {[*mask.shape]}, got {[*field.shape]}", key=name
            )
    if rewards is not None and rewards.shape != mask.shape[:1]:
        remedy = "; pass rewards.squeeze(-1)" if rewards.shape == (len(mask), 1) else ""
        problem = f"must have the shape [{len(mask)}], one per sequence, got {[*rewards.shape]}"
        raise ConfigurationError(f"{problem}{remedy}", key="rewards")
    if not 0 <= beta < math.inf:
        raise ConfigurationError(f"must be at least 0 and finite, got {beta}", key="beta")
