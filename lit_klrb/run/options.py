"""Options of Lightning's trainer that would train nothing, or something else than they say."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lit_klrb.errors import ConfigurationError


class Rule(NamedTuple):
    """What an option may be: a test of its value, and its words."""

    allows: Callable[[Any], bool]
    words: str


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value is None or value >= least


ENDLESS = "training data are endless, and max_steps says when to end"
RULES = {
    "max_steps": Rule(_at_least(1), "must be at least 1: training data are endless"),
    "max_epochs": Rule(lambda value: value in (None, -1), f"must be null: {ENDLESS}"),
    "min_epochs": Rule(lambda value: value is None or value <= 1, f"must be null: {ENDLESS}"),
    # 1 is one batch, 1.0 all of them.
    "limit_train_batches": Rule(
        lambda value: value is None or (isinstance(value, float) and value == 1.0),
        f"must be null or 1.0, or training would repeat the same batches: {ENDLESS}",
    ),
    "overfit_batches": Rule(
        lambda value: value == 0, f"must be 0, or training would repeat a few batches: {ENDLESS}"
    ),
    "val_check_interval": Rule(
        lambda value: value == 1.0 if isinstance(value, float) else not isinstance(value, int) or value >= 1,
        "must be a number of steps, at least 1, or a duration: endless data have no half",
    ),
    "check_val_every_n_epoch": Rule(_at_least(1), "must be null or at least 1"),
    "accumulate_grad_batches": Rule(_at_least(1), "must be at least 1"),
    "log_every_n_steps": Rule(_at_least(0), "must be 0 or larger"),
    "num_sanity_val_steps": Rule(_at_least(-1), "must be -1, 0 or larger"),
    "gradient_clip_val": Rule(
        lambda value: value is None or 0 <= value < math.inf, "must be null, or finite and 0 or larger"
    ),
}


def check_training_options(options: Mapping[str, Any]) -> None:
    """Refuse options with which training would not do what they say.

    Args:
        options: Arguments of `lightning.Trainer` by name; those that are left out are not looked at.

    Raises:
        ConfigurationError: Naming the option, what is allowed, and its value.

    Example:
        >>> check_training_options({"max_steps": 5, "limit_train_batches": 1.0})
        >>> check_training_options({"max_steps": 5, "limit_train_batches": 1})
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: limit_train_batches: must be null or 1.0, ...
    """
    for name, rule in RULES.items():
        if name in options and not rule.allows(options[name]):
            raise ConfigurationError(f"{rule.words}, got {options[name]}", key=name)
