"""The arguments of estimators, checked."""

import math
from numbers import Real
from typing import Any

from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.checks import check_integer, check_mask, check_shape
from lit_klrb.functional.logprobs import TokenStats


def check_rollout(
    stats: TokenStats,
    mask: Tensor,
    *,
    rewards: Tensor | None = None,
    beta: Any = 1.0,
    group_size: int = 1,
    **tokenwise: Tensor | None,
) -> None:
    """Check the shapes of a rollout, which would otherwise be broadcast to another gradient, and numbers.

    Raises:
        ConfigurationError: If the mask is not a boolean matrix, rewards are not one per sequence, anything
            else is not of the mask's shape, beta is negative or not finite, or the group size is no integer;
            names it.
    """
    check_mask(mask)
    shape = tuple(mask.shape)
    for name, field in stats._asdict().items():
        check_shape(f"stats.{name}", field, shape)
    for name, values in tokenwise.items():
        check_shape(name, values, shape)
    check_shape("rewards", rewards, shape[:1])
    check_integer(group_size=group_size)
    if not isinstance(beta, Real | Tensor) or not 0 <= float(beta) < math.inf:
        raise ConfigurationError(f"must be at least 0 and finite, got {beta}", key="beta")
