"""From the rows of others' logs to runs: which row belongs to which run, and where the run ended."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.results.logs import Row
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

# What has to be known of a run, and what may be.
COORDINATES = ("arm", "beta", "replicate")
METRICS = (schema.REWARD, schema.KL)
OPTIONAL = ("step", "seed")
# JSON's integers are exact up to here.
_LARGEST_SEED = 2**53


@dataclass(frozen=True)
class LoggedRun:
    """One run of other software.

    Attributes:
        arm: Label of its arm.
        beta: Its KL weight.
        replicate: What its replicate is called.
        seed: Its seed: runs of one seed are not independent.
        place: Where its first row is, for messages.
        curves: Metric -> step -> value; one step, 0, without a step column.
    """

    arm: str
    beta: float
    replicate: str
    seed: int
    place: str
    curves: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in METRICS})

    def __str__(self) -> str:
        return f"{self.arm}, beta {self.beta:g}, replicate {self.replicate}"

    @property
    def final(self) -> dict[str, float] | None:
        """Reward and KL at the last step that has both; None if the newest of either is not finite."""
        newest = [values[max(values)] for values in self.curves.values() if values]
        if not all(map(math.isfinite, newest)):
            return None
        common = set.intersection(*(set(values) for values in self.curves.values()))
        if not common:
            raise ConfigurationError(f"{self.place}: no row of {self} has both {' and '.join(METRICS)}")
        return {name: values[max(common)] for name, values in self.curves.items()}


def collect(
    rows: Iterable[Row], columns: Mapping[str, str], known: Mapping[str, Any] | None = None
) -> list[LoggedRun]:
    """The runs that rows belong to, in the order of their first rows.

    Args:
        rows: What was logged.
        columns: What is to be known -> the column that says it: the coordinates, unless `known`; reward and
            kl; and, if there are several rows per run, step.
        known: Coordinates that all rows have in common.

    Raises:
        ConfigurationError: If a column is not there, a value is not what it should be, or two rows say
            different things of one step of one run; one line with the place.
    """
    runs: dict[tuple[str, float, str], LoggedRun] = {}
    rows = list(rows)
    _check_columns(rows, columns)
    for row in rows:
        found = {name: row.values[column] for name, column in columns.items() if column in row.values}
        metrics = {name: _number(row, columns[name], found[name]) for name in METRICS if name in found}
        if not metrics and "step" in columns:
            continue  # other software logs other things in rows of their own
        for name in METRICS:
            if name not in metrics and "step" not in columns:
                raise ConfigurationError(
                    f"{row.place}: has no {columns[name]}; nan is expected of a run that diverged"
                )
        run = _run(row, columns, {**found, **(known or {})})
        run = runs.setdefault((run.arm, run.beta, run.replicate), run)
        step = _step(row, columns, found)
        for name, value in metrics.items():
            before = run.curves[name].setdefault(step, value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                hint = "" if "step" in columns else "; name a column `step`, of whose rows the last decides"
                raise ConfigurationError(f"{row.place}: another {name} of {run} than at {run.place}{hint}")
    return list(runs.values())


def _check_columns(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    present = {column for row in rows for column in row.values}
    for name, column in columns.items():
        if column not in present:
            file, known = rows[0].place.rpartition(": ")[0], ", ".join(sorted(present)[:20])
            raise ConfigurationError(f"columns.{name}: {column!r} is in no row of {file}; it has {known}")


def _run(row: Row, columns: Mapping[str, str], found: Mapping[str, Any]) -> LoggedRun:
    for name in COORDINATES:
        if name not in found:
            raise ConfigurationError(f"{row.place}: has no {columns[name]} ({name})")
    beta = _number(row, columns.get("beta", "beta"), found["beta"])
    if not (math.isfinite(beta) and beta >= 0):
        raise ConfigurationError(f"{row.place}: beta is {found['beta']!r}; a number >= 0 is expected")
    arm, replicate = (_label(row, name, found[name]) for name in ("arm", "replicate"))
    return LoggedRun(
        arm, beta, replicate, _seed(_label(row, "seed", found.get("seed", replicate))), row.place
    )


def _label(row: Row, name: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # some exports write every number with a point
    label = str(value).strip()
    if isinstance(value, list | bool) or not label or not label.isprintable():
        raise ConfigurationError(f"{row.place}: {name} is {value!r}; a name or a number is expected")
    return label


def _seed(label: str) -> int:
    """The seed itself if it is one, else a number that stands for its name."""
    if label.isdecimal() and int(label) < _LARGEST_SEED:
        return int(label)
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:6], "big")


def _step(row: Row, columns: Mapping[str, str], found: Mapping[str, Any]) -> int:
    if "step" not in columns:
        return 0
    if "step" not in found:
        raise ConfigurationError(f"{row.place}: has no {columns['step']} (step)")
    step = _number(row, columns["step"], found["step"])
    if not (step.is_integer() and step >= 0):
        raise ConfigurationError(
            f"{row.place}: {columns['step']} is {found['step']!r}; an integer >= 0 is expected"
        )
    return int(step)


def _number(row: Row, column: str, value: Any) -> float:
    try:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{row.place}: {column} is {value!r}; a number is expected") from None
