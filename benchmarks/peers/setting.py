"""One loss of other software with one setting, and what is certified of it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lit_klrb.cli.gradients import describe
from lit_klrb.cli.loss_roles import BoundLoss
from lit_klrb.estimators.certificate import certify
from lit_klrb.estimators.enumerated_loss import KL_LEVELS
from lit_klrb.estimators.identity import GradientIdentity

from .spread import spread

# What a loss is called that this package registers with other software
HOOK = "this package's hook"


class Setting(NamedTuple):
    """A loss with a setting."""

    loss: str  # the functions that are called, as their software names them
    options: Mapping[str, Any]  # what is set, by the software's own names
    defaults: Mapping[str, Any]  # the software's defaults of the same names, read from it
    called: str  # what the software says that it is
    function: Callable[..., Any]  # with parameters named by what they read, as `certify` knows them

    @property
    def name(self) -> str:
        """The loss and its setting, in one line."""
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.loss} {options}".strip()


def with_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, a loss per token, with the mask as a parameter that it does not read."""

    @functools.wraps(function)
    def loss(*, mask: Tensor, **inputs: Tensor) -> Any:
        return function(**inputs)

    parameters = inspect.signature(function).parameters.values()
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.default is p.empty]
    extra = inspect.Parameter("mask", inspect.Parameter.KEYWORD_ONLY)
    loss.__signature__ = inspect.Signature([*keywords, extra])  # type: ignore[attr-defined]
    return loss


def verdict(setting: Setting) -> dict[str, Any]:
    """What is certified of a loss: its gradient, how far that is from the KL's, and its spread."""
    loss = BoundLoss(setting.loss, setting.function, {}, {})
    found = certify(loss, takes_mask=loss.takes_mask, takes_old=loss.takes_old)
    gradient, batches = found.on_policy, spread(loss)
    return {
        "default": all(setting.defaults.get(key) == value for key, value in setting.options.items()),
        "called": setting.called,
        "gradient": describe(gradient),
        "normalisation": "summed over the batch" if found.over_batch else gradient.normalisation,
        "off_policy": None if found.off_policy is None else describe(found.off_policy),
        "padding": round(found.padding, 6),
        "cosine": [_worst(gradient, kl)[0] for kl in KL_LEVELS],
        "bias": [_worst(gradient, kl)[1] for kl in KL_LEVELS],
        "spread": batches.spread,
        "cosine_in_large_batches": batches.cosine,
    }


def _worst(gradient: GradientIdentity, kl: float) -> tuple[float, float]:
    """The smallest cosine with the KL's gradient and the largest bias, of the pairs with this KL."""
    levels = [level for level in gradient.levels if abs(level.kl - kl) < 1e-6]
    cosine = min(level.cosines["kl"] or 0.0 for level in levels)
    return round(cosine, 4), round(max(level.bias for level in levels), 4)
