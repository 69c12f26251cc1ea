"""A cell: one run of a sweep and its position in the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

# The configuration key of the KL estimator.
ESTIMATOR = "kl.estimator"


class Point(NamedTuple):
    """The position of a cell of the last stage in the grid."""

    arm: str
    beta: float
    beta_index: int
    replicate: int

    @property
    def place(self) -> tuple[str, int, int]:
        """(arm, beta index, replicate), which is unique within a sweep."""
        return self.arm, self.beta_index, self.replicate


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        id: SHA-256 of everything its result depends on.
        stage: The stage of the plan.
        point: Its arm, beta and replicate; None outside the grid.
        seed: Its seed, shared by all arms at the same beta and replicate.
        needs: Ids of the cells whose checkpoints it starts from.
        argv: Arguments of its command, with paths relative to the sweep's directory.
        overrides: The configuration values that its arm changes; empty outside the grid.
        config: Content of its configuration file; empty for a cell read from a file.
    """

    id: str
    stage: str
    point: Point | None
    seed: int
    needs: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        if self.point is None:
            return self.stage
        return f"{self.stage} {self.point.arm} beta={self.point.beta} #{self.point.replicate}"

    @property
    def title(self) -> str:
        """Its name on a page."""
        if self.point is None:
            return self.stage
        return f"{self.point.arm}, β = {self.point.beta:g}, replicate {self.point.replicate}"

    @property
    def place(self) -> tuple[str, int, int] | None:
        """(arm, beta index, replicate) of a cell of the grid."""
        return None if self.point is None else self.point.place

    def record(self) -> dict[str, Any]:
        """The description of the cell in a published result."""
        return {
            "stage": self.stage,
            **dict.fromkeys(Point._fields),
            **(self.point._asdict() if self.point else {}),
            "overrides": self.overrides,
            "seed": self.seed,
            "needs": list(self.needs),
            "argv": list(self.argv),
        }

    @classmethod
    def of_record(cls, cell_id: str, record: Mapping[str, Any]) -> Self:
        """Create a cell from its record.

        Raises:
            ValueError: If the record is invalid; names the member.
        """
        if "estimator" in record:  # earlier versions had an estimator instead of an arm
            name = record["estimator"]
            record = {**record, "arm": name, "overrides": {} if name is None else {ESTIMATOR: name}}
        expected = {"stage": str, "seed": int, "needs": list, "argv": list, "overrides": dict}
        coordinates = {"arm": str, "beta": float, "beta_index": int, "replicate": int}
        in_grid = any(record.get(name) is not None for name in coordinates)
        values: dict[str, Any] = {}
        for name, kind in (expected | coordinates if in_grid else expected).items():
            value = record.get(name)
            # JSON does not distinguish 1.0 from 1
            value = float(value) if kind is float and type(value) is int else value
            if type(value) is not kind:
                raise ValueError(f"cell.{name} is {value!r}, expected {kind.__name__}")
            values[name] = value
        point = Point(*(values[name] for name in Point._fields)) if in_grid else None
        needs, argv = (tuple(map(str, values[name])) for name in ("needs", "argv"))
        return cls(cell_id, values["stage"], point, values["seed"], needs, argv, values["overrides"])
