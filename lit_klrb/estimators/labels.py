"""What is printed of estimators: their names with settings, and what they are for."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from lit_klrb.errors import ConfigurationError


class Explanation(NamedTuple):
    """Text that `lit-klrb explain` prints beside what it derives and measures.

    Args:
        optimises: What the gradient estimates in expectation, on-policy; see `EstimatorMemory.statement`.
        used_by: Other software that uses the estimator, if any is known.
        caution: Known limitations.
    """

    optimises: str
    used_by: str | None = None
    caution: str | None = None


class Labelled(Protocol):
    """What has a label, as estimators do."""

    @property
    def label(self) -> str:
        """Its class and settings."""


def label_of(estimator: Any) -> str:
    """The class of a dataclass's instance, with the settings that are no default; see `KLEstimator.label`."""
    changed = [
        f"{field.name}={as_yaml(getattr(estimator, field.name))}"
        for field in fields(estimator)
        if field.name != "allow_biased" and getattr(estimator, field.name) != field.default
    ]
    return type(estimator).__name__ + (f"({', '.join(changed)})" if changed else "")


def check_different(estimators: Sequence[Labelled]) -> None:
    """Check that there are estimators to compare, whose labels tell them apart."""
    labels = [estimator.label for estimator in estimators]
    if not labels or len(set(labels)) < len(labels):
        raise ConfigurationError(f"must differ, got {labels}", key="estimators")


def as_yaml(value: object) -> str:
    """A setting as it is written in a configuration."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_yaml, value))}]"
    return "null" if value is None else str(value)
