"""The records of single cells: published results, and failures."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.results.arrays import FloatArray as FloatArray
from analysis.results.artifacts import Study, read_studies, unknown_studies
from analysis.results.cell import Cell, Point
from analysis.results.checksum import canonical, digest
from analysis.results.files import MALFORMED, DamagedFileError, parse_json, read_bytes, read_json
from analysis.results.layout import RESULT_SCHEMA, RESULTS
from lit_klrb import schema

# Larger numbers, whose fourth powers overflow, are not results; those of float32 are below this one.
LARGEST_VALUE = 1e39
# Maximum relative error of a value that is published with four significant digits.
_ROUNDING = 6e-4


@dataclass(frozen=True, eq=False)
class Curve:
    """A metric logged during training: values [T] at increasing steps [T], diverged values as `nan`."""

    step: FloatArray
    value: FloatArray


class Completion(NamedTuple):
    """The completion of one evaluation prompt at the first and at the last evaluation of a run."""

    text_at_start: str
    reward_at_start: float
    text: str
    reward: float


@dataclass(frozen=True, eq=False)
class Run:
    """A published result. If it diverged, its outcome is `nan`, regardless of the file.

    Attributes:
        cell: The cell.
        diverged: Whether it diverged.
        final: Metric -> value at the final evaluation.
        curves: Metric -> values logged during training.
        versions: Package -> version used for the run.
        checksum: The checksum of the file.
        studies: Artifacts of its studies.
        completions: A few of its completions.
        settings: Its hyperparameters: dotted key -> value.
        prompts: Metric -> its value for each prompt of the final evaluation, shape [P], rounded; empty if it
            diverged or was published by an earlier version.
        other_studies: Artifacts of studies that `analysis` does not read, by name, as published.
        weights: Hash of the trained weights; "" if unknown.
    """

    cell: Cell
    diverged: bool
    final: dict[str, float]
    curves: dict[str, Curve]
    versions: dict[str, str]
    checksum: str
    studies: tuple[Study, ...] = ()
    completions: tuple[Completion, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, FloatArray] = field(default_factory=dict)
    other_studies: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""

    @property
    def file(self) -> str:
        """The name of its file, for messages."""
        return f"{RESULTS}/{self.cell.id}.json"

    @property
    def point(self) -> Point:
        """The position of a run in the grid.

        Raises:
            ValueError: If it is outside the grid.
        """
        if self.cell.point is None:
            raise ValueError(f"{self.cell} is outside the grid")
        return self.cell.point

    def outcome(self, key: str) -> float:
        """A final metric; `nan` if absent or if the run diverged."""
        return math.nan if self.diverged else self.final.get(key, math.nan)

    def first(self, key: str) -> float | None:
        """A metric's evaluation before the first step of training; None if there was none."""
        curve = self.curves.get(f"val/{key}")
        if curve is None or not len(curve.step) or curve.step[0] != 0 or math.isnan(curve.value[0]):
            return None
        return float(curve.value[0])


@dataclass(frozen=True)
class Failure:
    """A cell that ended without a result for technical reasons: its matched pair is dropped."""

    cell: Cell
    attempts: int
    error: str


def encode_result(result: dict[str, Any]) -> bytes:
    """The bytes of a published result: canonical JSON with its checksum inside.

    Args:
        result: The result without its checksum.
    """
    return canonical({**result, "checksum": digest(result)})


def read_result(path: Path) -> dict[str, Any]:
    """Read a published result and check it against its checksum and its name.

    Raises:
        DamagedFileError: If the file is not what was published.
    """
    content = _decode(path, read_bytes(path))
    if content.get("id") != path.stem:
        raise DamagedFileError(f"{path}: holds the result of another cell, {content.get('id')!r}")
    return content


def read_run(path: Path) -> Run:
    """Read a published result as the statistics need it.

    Raises:
        DamagedFileError: If the file is not what was published, or not a result.
    """
    return _run_of(path, read_result(path))


def decode_run(line: Path, raw: bytes) -> Run:
    """The result in one line of an archive, as the statistics need it.

    Args:
        line: The archive, with the number of the line.
        raw: The line.

    Raises:
        DamagedFileError: If the line is not what was published, or not a result.
    """
    return _run_of(line, _decode(line, raw))


def _decode(path: Path, raw: bytes) -> dict[str, Any]:
    """A result that matches its checksum and has a known schema."""
    content = parse_json(path, raw)
    try:
        # Canonical JSON without this member is canonical too, so it need not be formatted again
        rest = raw.replace(b'"checksum":"%s",' % content["checksum"].encode(), b"", 1)
        intact = hashlib.sha256(rest).hexdigest() == content["checksum"]
    except (KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise DamagedFileError(f"{path}: does not match its checksum; it was changed after it was published")
    if content.get("schema") != RESULT_SCHEMA:
        raise DamagedFileError(
            f"{path}: has schema {content.get('schema')!r}; this version reads {RESULT_SCHEMA}"
        )
    return dict(content)


def _run_of(path: Path, content: dict[str, Any]) -> Run:
    try:
        return _run(content)
    except MALFORMED as error:
        raise DamagedFileError(f"{path}: not a result ({type(error).__name__}: {error})") from None


def _run(content: dict[str, Any]) -> Run:
    cell = Cell.of_record(content["id"], content["cell"])
    if content["state"] not in (schema.DONE, schema.DIVERGED):
        raise ValueError(f"state {content['state']!r}, expected {schema.DONE!r} or {schema.DIVERGED!r}")
    final = {key: _number(value) for key, value in content["final"].items()}
    # Whether a run without a reward counts as diverged depends on the plan
    finite = all(math.isfinite(final.get(key, 0.0)) for key in (schema.REWARD, schema.KL))
    diverged = content["state"] == schema.DIVERGED or (cell.arm is not None and not finite)
    return Run(
        cell,
        diverged,
        final,
        {key: _curve(curve) for key, curve in content["curves"].items()},
        {str(key): str(value) for key, value in content["versions"].items()},
        content["checksum"],
        read_studies(content.get("studies", {})),
        tuple(
            Completion(
                str(one["text_at_start"]),
                _number(one["reward_at_start"]),
                str(one["text"]),
                _number(one["reward"]),
            )
            for one in content.get("completions", ())
        ),
        {str(key): str(value) for key, value in content.get("settings", {}).items()},
        {} if diverged else _prompts(content.get("prompts", {}), final),
        unknown_studies(content.get("studies", {})),
        str(content.get(schema.WEIGHTS, "")),
    )


def _prompts(content: dict[str, list[Any]], final: Mapping[str, float]) -> dict[str, FloatArray]:
    """The values of the prompts, whose means are the final metrics up to rounding."""
    if not content:
        return {}
    found = {key: np.array([_number(value) for value in content[key]]) for key in (schema.REWARD, schema.KL)}
    if len({len(values) for values in found.values()}) > 1:
        raise ValueError("prompts has different numbers of rewards and KLs")
    if not len(found[schema.KL]):
        raise ValueError("prompts has no values")
    for key, values in found.items():
        rounding = _ROUNDING * float(np.abs(values).mean())
        if not abs(float(values.mean()) - final[key]) <= rounding:
            raise ValueError(f"the mean of prompts.{key} is {values.mean():g}, final.{key} is {final[key]:g}")
    return found


def _number(value: Any) -> float:
    """A finite number of a result, or `nan` for null, which replaces numbers that are not finite."""
    number = math.nan if value is None else float(value)
    if abs(number) > LARGEST_VALUE:
        raise ValueError(f"{value!r} is too large")
    return number


def _curve(curve: dict[str, list[Any]]) -> Curve:
    step, value = (np.array([_number(x) for x in curve[name]]) for name in ("step", "value"))
    if len(step) != len(value) or not (np.diff(step) > 0).all():
        raise ValueError("a curve has as many values as steps, and its steps increase")
    return Curve(step, value)


def encode_failure(cell_id: str, cell: dict[str, Any], attempts: int, error: str) -> bytes:
    """The content of the record that a cell ended without a result."""
    record = {"id": cell_id, "cell": cell, "attempts": attempts, "error": error}
    return json.dumps(record, indent=1).encode()


def read_failure(path: Path) -> Failure:
    """Read the record of a cell that ended without a result.

    Raises:
        DamagedFileError: If it is not such a record.
    """
    content = read_json(path)
    try:
        if content["id"] != path.stem:
            raise ValueError(f"holds the cell {content['id']!r}")
        cell = Cell.of_record(content["id"], content["cell"])
        return Failure(cell, int(content["attempts"]), str(content["error"]))
    except MALFORMED as error:
        raise DamagedFileError(f"{path}: not a record ({type(error).__name__}: {error})") from None
