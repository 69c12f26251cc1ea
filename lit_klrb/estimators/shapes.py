"""The arguments of estimators, checked, and the weights that they give."""

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.checks import check_integer, check_mask, check_shape
from lit_klrb.functional.logprobs import TokenStats


class LossWeights(NamedTuple):
    """Detached weights of the loss, which is the masked sum of score log p(y_t) + kl l_t + value E_t over B.

    Args:
        score: Weight of each token's log-probability, c_t, shape [B, T]; 0 outside the mask.
        kl: Weight of the estimator's differentiable KL term l_t, shape [B, T]; 0 outside the mask.
        value: Weight of the expected token value E_t, shape [B, T]; None without token values.
    """

    score: Tensor
    kl: Tensor
    value: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "LossWeights":
        """Apply a function to every field that is not None, such as indexing or a change of device."""
        value = None if self.value is None else change(self.value)
        return LossWeights(change(self.score), change(self.kl), value)


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


def with_checks(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an estimator that checks its arguments first."""

    @functools.wraps(method)
    def checked(self: Any, stats: TokenStats, mask: Tensor, *args: Any, **settings: Any) -> Any:
        third = args[0] if args else settings.get({"weights": "rewards", "loss": "weights"}.get(name, ""))
        arguments = third._asdict() if isinstance(third, LossWeights) else {"rewards": third}
        checked_settings = "beta", "group_size", "behaviour_logprobs"
        arguments |= {key: settings[key] for key in checked_settings if key in settings}
        check_rollout(stats, mask, **arguments)
        return method(self, stats, mask, *args, **settings)

    return checked
