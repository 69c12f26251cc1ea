"""Properties of an arm, determined when the plan is made and locked with it."""

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
    """The module and the estimator of an arm.

    Args:
        module: Class of the trained module; None if unknown.
        estimator: Class of its KL estimator; None if unknown, or if it has none.
        optimises: What the estimator's gradient optimises; None if unknown.
        biased: Whether that is known to differ from KL(policy || reference).
        evaluation: Configuration key -> [its value, the control's value], where its evaluation differs.
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
        """Create an arm from its record.

        Raises:
            ValueError: If the record is invalid; names the member.
        """
        for name, kinds in _MEMBERS.items():
            if not isinstance(record.get(name), kinds):
                raise ValueError(f"{name} of an arm is {record.get(name)!r}")
        for key, values in record["evaluation"].items():
            if not isinstance(values, list) or len(values) != 2:
                raise ValueError(f"evaluation of an arm has {values!r} for {key}")
        return cls(**{name: record[name] for name in _MEMBERS})
