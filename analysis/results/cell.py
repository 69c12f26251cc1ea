"""A cell: one run of a sweep and its position in the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

# The configuration key of the KL estimator.
ESTIMATOR = "kl.estimator"


# Members of a position, and their types in a record.
_COORDINATES = {"arm": str, "beta": float, "beta_index": int, "replicate": int}


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


class Trial(NamedTuple):
    """The position of a cell of the tuning stage: an arm at one rate."""

    arm: str
    beta: float
    beta_index: int
    replicate: int
    rate: float


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
        overrides: The configuration values that its arm and its block change; empty outside the grid.
        config: Content of its configuration file; empty for a cell read from a file.
        trial: Its arm, beta, replicate and rate in the tuning stage; None elsewhere.
        tuned_by: Hash of the ids of the trials from which its rate is chosen; "" without tuning.
    """

    id: str
    stage: str
    point: Point | None
    seed: int
    needs: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    trial: Trial | None = None
    tuned_by: str = ""

    def __str__(self) -> str:
        where, rate = self.point or self.trial, f" rate={self.trial.rate:g}" if self.trial else ""
        return (
            self.stage
            if where is None
            else f"{self.stage} {where.arm}{rate} beta={where.beta} #{where.replicate}"
        )

    @property
    def title(self) -> str:
        """Its name on a page."""
        if self.point is None:
            return str(self)
        return f"{self.point.arm}, β = {self.point.beta:g}, replicate {self.point.replicate}"

    @property
    def place(self) -> tuple[str, int, int] | None:
        """(arm, beta index, replicate) of a cell of the grid."""
        return None if self.point is None else self.point.place

    @property
    def arm(self) -> str | None:
        """The arm of a cell of the grid or of the tuning stage."""
        where = self.point or self.trial
        return where and where.arm

    def record(self) -> dict[str, Any]:
        """The description of the cell in a published result."""
        return {
            "stage": self.stage,
            **(self.point._asdict() if self.point else dict.fromkeys(Point._fields)),
            "overrides": self.overrides,
            "seed": self.seed,
            "needs": list(self.needs),
            "argv": list(self.argv),
            **({} if self.trial is None else {"trial": self.trial._asdict()}),
            **({"tuned_by": self.tuned_by} if self.tuned_by else {}),
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
        in_grid = any(record.get(name) is not None for name in Point._fields)
        values = _checked(record, expected)
        point = Point(**_checked(record, _COORDINATES)) if in_grid else None
        trial = record.get("trial")
        if trial is not None:
            trial = Trial(**_checked(trial, {**_COORDINATES, "rate": float}))
        needs, argv = (tuple(map(str, values[name])) for name in ("needs", "argv"))
        return cls(
            cell_id,
            values["stage"],
            point,
            values["seed"],
            needs,
            argv,
            values["overrides"],
            trial=trial,
            tuned_by=str(record.get("tuned_by", "")),
        )


def _checked(record: Mapping[str, Any], expected: Mapping[str, type]) -> dict[str, Any]:
    """The expected members of a record, of the expected types."""
    values: dict[str, Any] = {}
    for name, kind in expected.items():
        value = record.get(name)
        # JSON does not distinguish 1.0 from 1
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind:
            raise ValueError(f"cell.{name} is {value!r}, expected {kind.__name__}")
        values[name] = value
    return values
