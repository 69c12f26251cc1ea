"""The configuration keys that a plan gives, with their values."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

# Configuration keys of a run that the design sets, and that of the KL estimator.
SEED, BETA, ESTIMATOR = "seed_everything", "kl.beta", "kl.estimator"
# The key of a value that differs between betas: {by_beta: {index: value}}.
BY_BETA = "by_beta"


def by_beta(value: object) -> dict[str, Any] | None:
    """Index of beta, as text -> value; None if a value of an arm is the same at every beta."""
    if not (isinstance(value, Mapping) and list(value) == [BY_BETA] and isinstance(value[BY_BETA], Mapping)):
        return None
    return {str(index): each for index, each in value[BY_BETA].items()}


def plain_key(key: str) -> str:
    """A configuration key without `init_args`, which are optional on the command line."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def _plain_keys(content: Any) -> Any:
    """Configuration keys in the one spelling that plans have, so that equal plans have equal ids."""
    if not (isinstance(content, Mapping) and all(isinstance(key, str) for key in content)):
        return content
    plain = {plain_key(key): value for key, value in content.items()}
    if len(plain) < len(content):
        raise ValueError("a key is given twice, with `init_args` and without")
    return plain


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, with their keys joined by dots.

    Example:
        >>> dict(flat({"model": {"lr": 0.1, "layers": [1, 2]}}))
        {'model.lr': 0.1, 'model.layers': [1, 2]}
    """
    for key, value in content.items():
        inner = isinstance(value, Mapping)
        yield from flat(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]


# With the indices of beta as text, as keys of mappings are in JSON
Value = Annotated[Any, BeforeValidator(lambda value: {BY_BETA: each} if (each := by_beta(value)) else value)]
# Configuration key -> value, and -> the stage whose checkpoint it receives
Overrides = Annotated[dict[str, Value], BeforeValidator(_plain_keys)]
Inputs = Annotated[dict[str, str], BeforeValidator(_plain_keys)]
