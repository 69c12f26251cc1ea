"""Single cells as types: a cell, its published result or its failure, and what an arm is known to do."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
)
from pydantic.dataclasses import dataclass

from analysis.results.artifacts import STUDIES, Study, read_studies
from analysis.results.keys import Overrides
from analysis.results.layout import RESULTS
from analysis.results.plan import CLOSED, WITH_NAN, Point, Trial
from analysis.results.store import MALFORMED, DamagedFileError, read_json, read_result, reason
from lit_klrb import schema

# The key of J = reward - beta * KL.
OBJECTIVE = "objective"
# Maximum relative error of a value that is published with four significant digits.
_ROUNDING = 6e-4


def _values(values: Any) -> npt.NDArray[np.float64]:
    result = np.array(values, dtype=np.float64)
    if result.ndim != 1:
        raise ValueError("a list of numbers")
    return result


Value = Annotated[StrictFloat, BeforeValidator(lambda value: math.nan if value is None else value)]
Values = Annotated[npt.NDArray[np.float64], PlainValidator(_values)]


@dataclass(frozen=True, config=CLOSED)
class Arm:
    """The module and the estimator of an arm, determined when the plan is made and locked with it."""

    module: str | None = None  # class of the trained module; None if unknown
    estimator: str | None = None  # class of its KL estimator; None if unknown, or if it has none
    optimises: str | None = None  # what the estimator's gradient optimises; None if unknown
    biased: StrictBool = False  # whether that is known to differ from KL(policy || reference)
    # Configuration key -> [its value, the control's value], where its evaluation differs
    evaluation: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] = field(
        default_factory=dict
    )


@dataclass(frozen=True, config=CLOSED)
class Cell:
    """One run."""

    id: str  # SHA-256 of everything its result depends on
    stage: str  # the stage of the plan
    point: Point | None  # its arm, beta and replicate; None outside the grid
    seed: StrictInt  # its seed, shared by all arms at the same beta and replicate
    needs: tuple[str, ...] = ()  # ids of the cells whose checkpoints it starts from
    argv: tuple[str, ...] = ()  # arguments of its command, with paths relative to the sweep's directory
    # The configuration values that its arm and its block change; empty outside the grid
    overrides: Overrides = field(default_factory=dict)
    # Content of its configuration file; empty for a cell read from a file
    config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    trial: Trial | None = None  # its arm, beta, replicate and rate in the tuning stage; None elsewhere
    tuned_by: str = ""  # hash of the ids of the trials from which its rate is chosen; "" without tuning

    def __str__(self) -> str:
        if (at := self.where) is None:
            return self.stage
        rate = f" rate={self.trial.rate:g}" if self.trial else ""
        return f"{self.stage} {at.arm}{rate} beta={at.beta} #{at.replicate}"

    @property
    def title(self) -> str:
        """Its name on a page."""
        at = self.point
        return f"{at.arm}, β = {at.beta:g}, replicate {at.replicate}" if at else str(self)

    @property
    def place(self) -> tuple[str, int, int] | None:
        """(arm, beta index, replicate) of a cell of the grid."""
        return None if self.point is None else self.point.place

    @property
    def arm(self) -> str | None:
        """The arm of a cell of the grid or of the tuning stage."""
        return self.where and self.where.arm

    @property
    def where(self) -> Point | Trial | None:
        """The position of a cell of the grid or of the tuning stage."""
        return self.point or self.trial

    def record(self) -> dict[str, Any]:
        """Its written form in a published result."""
        point = self.point._asdict() if self.point else dict.fromkeys(Point._fields)
        trial = {"trial": self.trial._asdict()} if self.trial else {}
        tuned = {"tuned_by": self.tuned_by} if self.tuned_by else {}
        run = {"overrides": self.overrides, "seed": self.seed, "needs": [*self.needs], "argv": [*self.argv]}
        return {"stage": self.stage, **point, **run, **trial, **tuned}

    @classmethod
    def of_record(cls, cell_id: str, record: Mapping[str, Any]) -> Self:
        """Create a cell from its written form; raises `MALFORMED` if it is invalid."""
        rest = {key: value for key, value in record.items() if key not in (*Point._fields, "id")}
        point: Any = {name: record[name] for name in Point._fields}
        return cls(id=cell_id, point=None if {*point.values()} == {None} else point, **rest)


@dataclass(frozen=True, eq=False, config=WITH_NAN)
class Curve:
    """A metric logged during training: values [T] at increasing steps [T], diverged values as `nan`."""

    step: Values
    value: Values

    def __post_init__(self) -> None:
        if len(self.step) != len(self.value) or not (np.diff(self.step) > 0).all():
            raise ValueError("a curve has as many values as steps, and its steps increase")


class Completion(NamedTuple):
    """The completion of one evaluation prompt at the first and at the last evaluation of a run."""

    text_at_start: str
    reward_at_start: Value
    text: str
    reward: Value


@dataclass(frozen=True, eq=False, config=WITH_NAN)
class Run:
    """A published result. If it diverged, its outcome is `nan`, regardless of the file."""

    cell: Cell
    diverged: StrictBool
    final: dict[str, Value]  # metric -> value at the final evaluation
    curves: dict[str, Curve]  # metric -> values logged during training
    versions: dict[str, str]  # package -> version used for the run
    checksum: str
    studies: tuple[Study, ...] = ()  # artifacts of its studies
    completions: tuple[Completion, ...] = ()  # a few of its completions
    settings: Mapping[str, str] = field(default_factory=dict)  # its hyperparameters: dotted key -> value
    # Metric -> its value for each prompt of the final evaluation, shape [P], rounded; empty if it diverged or
    # did not write them
    prompts: dict[str, Values] = field(default_factory=dict)
    # Artifacts of studies that `analysis` does not read, by name, as published
    other_studies: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""  # hash of the trained weights; "" if unknown
    # Split -> hash of the encoded rows that it was trained on or evaluated with
    rows: dict[str, str] = field(default_factory=dict)
    processes: StrictInt | None = None  # in which it trained together; None if unknown
    step_rows: StrictInt | None = None  # on which all of them train in a step; None if unknown
    evaluation_prompts: StrictInt = 0  # number of prompts of the final evaluation; 0 if not recorded

    @property
    def file(self) -> str:
        """The name of its file, for messages."""
        return f"{RESULTS}/{self.cell.id}.json"

    @property
    def point(self) -> Point:
        """The position of a run in the grid; a ValueError outside it."""
        if self.cell.point is None:
            raise ValueError(f"{self.cell} is outside the grid")
        return self.cell.point

    def outcome(self, key: str) -> float:
        """A final metric, or J = reward - beta * KL as "objective"; `nan` if absent or if it diverged."""
        if key == OBJECTIVE and self.cell.where is not None:
            return self.outcome(schema.REWARD) - self.cell.where.beta * self.outcome(schema.KL)
        return math.nan if self.diverged else self.final.get(key, math.nan)

    def standard_error(self, key: str) -> float:
        """That of a final metric, from its values per prompt.

        It is `nan` without them: nothing shows then whether a recorded one is right, so none is used.
        """
        values = self.prompts.get(key, np.zeros(0))
        return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan

    def decisive(self, outcome: str) -> float:
        """What decides in a plan, higher being better: J, or the negative KL."""
        return -self.outcome(schema.KL) if outcome == schema.KL else self.outcome(OBJECTIVE)

    def first(self, key: str) -> float | None:
        """A metric's evaluation before the first step of training; None if there was none."""
        curve = self.curves.get(f"val/{key}")
        if curve is None or not len(curve.step) or curve.step[0] != 0 or math.isnan(curve.value[0]):
            return None
        return float(curve.value[0])

    @classmethod
    def of_record(cls, content: Mapping[str, Any]) -> Self:
        """Create a run from the content of a published result; raises `MALFORMED` if it is invalid."""
        final, studies = content["final"], content.get("studies", {})
        if content["state"] not in (schema.DONE, schema.DIVERGED):
            raise ValueError(f"state {content['state']!r}, expected {schema.DONE!r} or {schema.DIVERGED!r}")
        cell = Cell.of_record(content["id"], content["cell"])
        # Whether a run without a reward counts as diverged depends on the plan
        lost = any(final.get(key, 0.0) is None for key in (schema.REWARD, schema.KL))
        diverged = content["state"] == schema.DIVERGED or (cell.arm is not None and lost)
        return cls(
            cell=cell,
            diverged=diverged,
            studies=read_studies(studies),
            completions=content.get("completions", ()),
            settings={key: str(value) for key, value in content.get("settings", {}).items()},
            prompts={} if diverged else content.get("prompts", {}),
            other_studies={name: one for name, one in studies.items() if name not in STUDIES},
            weights=content.get(schema.WEIGHTS, ""),
            rows=content.get(schema.ROWS, {}),
            processes=content.get(schema.PROCESSES),
            step_rows=content.get(schema.STEP_ROWS),
            evaluation_prompts=content.get(schema.PROMPTS, 0),
            **{key: content[key] for key in ("final", "curves", "versions", "checksum")},
        )

    def __post_init__(self) -> None:
        """Check that the means of the values of the prompts are the final metrics up to rounding."""
        if not self.prompts:
            return
        if len({len(self.prompts[key]) for key in (schema.REWARD, schema.KL)}) > 1:
            raise ValueError("prompts has different numbers of rewards and KLs")
        if not len(self.prompts[schema.KL]):
            raise ValueError("prompts has no values")
        for key, values in self.prompts.items():
            mean, rounding = float(values.mean()), _ROUNDING * float(np.abs(values).mean())
            if not abs(mean - self.final[key]) <= rounding:
                raise ValueError(f"the mean of prompts.{key} is {mean:g}, final.{key} is {self.final[key]:g}")


@dataclass(frozen=True, config=CLOSED)
class Failure:
    """A cell that ended without a result for technical reasons: its matched pair is dropped."""

    cell: Cell
    attempts: StrictInt
    error: str


def read_run(path: Path, raw: bytes | None = None) -> Run:
    """Read a published result for the statistics, see `read_result`; a DamagedFileError if it is none."""
    content = read_result(path, raw)
    with _reading(path, "a result"):
        return Run.of_record(content)


def read_failure(path: Path, raw: bytes | None = None) -> Failure:
    """Read the record of a cell that ended without a result; a DamagedFileError if it is none."""
    content = read_json(path, raw)
    with _reading(path, "a record"):
        if (name := content["id"]) != path.stem:
            raise ValueError(f"holds the cell {name!r}")
        return Failure(Cell.of_record(name, content["cell"]), content["attempts"], content["error"])


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except MALFORMED as error:
        raise DamagedFileError(f"{path}: not {what} ({reason(error)})") from None
