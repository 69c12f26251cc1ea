"""What is known of an arm beside what it changes: found out when the plan is made, locked with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_MEMBERS = {
    "module": (str, type(None)),
    "estimator": (str, type(None)),
    "optimises": (str, type(None)),
    "biased": (bool,),
    "evaluation": (dict,),
}


@dataclass(frozen=True)
class Arm:
    """What an arm trains with, and what that optimises.

    Args:
        module: Class of the module it trains; None if unknown.
        estimator: Class of its KL estimator; None if unknown, or if it has none.
        optimises: What the estimator's gradient is that of; None if unknown.
        biased: Whether it is known not to be that of KL(policy || reference).
        evaluation: Configuration key -> [its value, the control's], where its evaluation is another one.
    """

    module: str | None = None
    estimator: str | None = None
    optimises: str | None = None
    biased: bool = False
    evaluation: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.estimator is None:
            return self.module or "unknown"
        name = f"{self.estimator}{', biased' if self.biased else ''}"
        return f"{name}: optimises {self.optimises}" if self.optimises else name

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """The arm that `record` describes.

        Raises:
            ValueError: If it is not a record, naming the member.
        """
        for name, kinds in _MEMBERS.items():
            if not isinstance(record.get(name), kinds):
                raise ValueError(f"{name} of an arm is {record.get(name)!r}")
        for key, values in record["evaluation"].items():
            if not isinstance(values, list) or len(values) != 2:
                raise ValueError(f"evaluation of an arm has {values!r} for {key}")
        return cls(**{name: record[name] for name in _MEMBERS})
