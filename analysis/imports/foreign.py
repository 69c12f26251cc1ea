"""Converts rows of logs of other software to runs."""

import glob
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from analysis.imports.logs import Row, read_rows
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

# The coordinates of a run; `run` is a name for which the mapping's `runs` gives them.
COORDINATES = ("arm", "beta", "replicate")
METRICS = (schema.REWARD, schema.KL)
# Everything for which a mapping may name a column.
COLUMNS = (*COORDINATES, "run", "seed", *METRICS, "step")
# Placeholders in names of files and columns for the coordinates of a run.
_PLACEHOLDER = re.compile(r"\{(arm|beta|replicate|run)\}")
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
# JSON's integers are exact up to here.
_LARGEST_SEED = 2**53


@dataclass
class LoggedRun:
    """One run of other software."""

    arm: str  # label of its arm
    beta: float  # its KL weight
    replicate: str  # the name of its replicate
    seed: int  # its seed; runs with the same seed are not independent
    place: str  # the place of its first row, for messages
    # Metric -> step -> value; one step, 0, without a step column
    curves: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in METRICS})
    repeated: int = 0  # number of its rows that stood in the log before

    def __str__(self) -> str:
        return f"{self.arm}, beta {self.beta:g}, replicate {self.replicate}"

    @property
    def final(self) -> dict[str, float] | None:
        """Reward and KL at the last step that has both; None if the latest value of either is not finite.

        Raises:
            ConfigurationError: If no step has both.
        """
        newest = [values[max(values)] for values in self.curves.values() if values]
        if not all(map(math.isfinite, newest)):
            return None
        common = set.intersection(*(set(values) for values in self.curves.values()))
        if not common:
            steps = [
                f"{name} at {', '.join(map(str, sorted(v)[:3]))}" for name, v in self.curves.items() if v
            ]
            problem = f"no row of {self} has both {' and '.join(METRICS)}"
            remedy = f"its steps: {'; '.join(steps)}; write the step of one in the rows of the other"
            raise ConfigurationError(f"{self.place}: {problem}; {remedy}")
        return {name: values[max(common)] for name, values in self.curves.items()}


Runs = dict[tuple[str, float, str], LoggedRun]


def add_rows(
    runs: Runs,
    rows: Sequence[Row],
    columns: Mapping[str, str],
    known: Mapping[str, Any],
    named: Mapping[str, Mapping[str, Any]],
) -> None:
    """Sort the rows of one file into runs.

    Args:
        runs: Those found so far, to which new ones are added.
        rows: What was logged.
        columns: What is to be known, of `COLUMNS` -> the column that says it; {arm} and the like in the names
            of the metrics' columns mean that each run has columns of its own.
        known: What the file's name says of all rows.
        named: Name of a run -> its coordinates, where a column or a file says `run`.

    Raises:
        ConfigurationError: If a column is not there, a value is not what it should be, or two rows say
            different things of one step of one run; one line with the place.
    """
    present = list(dict.fromkeys(column for row in rows for column in row.values))
    file, widest = rows[0].place.rpartition(": ")[0], columns[schema.REWARD]
    places: list[dict[str, str]] = [{}]
    if _PLACEHOLDER.search(widest):
        matches = map(template(widest).fullmatch, present)
        places = [match.groupdict() for match in matches if match]
        if not places:
            raise ConfigurationError(f"columns.reward: no column of {file} is like {widest!r}")
    for coordinates in places:
        mine = {name: filled(column, coordinates) for name, column in columns.items()}
        for name, column in mine.items():
            if column not in present:
                having = ", ".join(present[:20])
                text = f"columns.{name}: {column!r} is in no row of {file}; it has {having}"
                raise ConfigurationError(text)
        for row in rows:
            _add_row(runs, row, mine, {**known, **coordinates}, named)


def _add_row(
    runs: Runs,
    row: Row,
    columns: Mapping[str, str],
    known: Mapping[str, Any],
    named: Mapping[str, Mapping[str, Any]],
) -> None:
    cells = {name: row.values[column] for name, column in columns.items() if column in row.values}
    metrics = {name: _number(row, columns[name], cells[name]) for name in METRICS if name in cells}
    if not metrics and "step" in columns:
        return  # other software logs other things in rows of their own
    for name in METRICS:
        if name not in metrics and "step" not in columns:
            raise ConfigurationError(f"{row.place}: has no {columns[name]}; a number is expected")
    run, step = _run(runs, row, {**cells, **known}, named), _step(row, columns, cells)
    run.repeated += all(step in run.curves[name] for name in metrics)
    for name, value in metrics.items():
        before = run.curves[name].setdefault(step, value)
        if before != value and not (math.isnan(before) and math.isnan(value)):
            hint = "" if "step" in columns else "; name a column `step`, of whose rows the last decides"
            raise ConfigurationError(f"{row.place}: another {name} of {run} than at {run.place}{hint}")


def _run(runs: Runs, row: Row, cells: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]) -> LoggedRun:
    if "run" in cells:
        name = _label(row, "run", cells["run"])
        if name not in named:
            raise ConfigurationError(f"{row.place}: the run {name!r} is not among the mapping's `runs`")
        cells = {**cells, **named[name]}
    for name in COORDINATES:
        if name not in cells:
            text = f"{name} is unknown: neither a column nor the name of the file or run has it"
            raise ConfigurationError(f"{row.place}: {text}")
    beta = _number(row, "beta", cells["beta"])
    if not (math.isfinite(beta) and beta >= 0):
        raise ConfigurationError(f"{row.place}: beta is {cells['beta']!r}; a number >= 0 is expected")
    arm, replicate = (_label(row, name, cells[name]) for name in ("arm", "replicate"))
    label = _label(row, "seed", cells.get("seed", replicate))
    number = label.isdecimal() and int(label) < _LARGEST_SEED
    seed = int(label) if number else int.from_bytes(hashlib.sha256(label.encode()).digest()[:6], "big")
    return runs.setdefault((arm, beta, replicate), LoggedRun(arm, beta, replicate, seed, row.place))


def matching_files(folder: Path, name: str) -> list[tuple[Path, dict[str, str]]]:
    """The files below a folder whose path matches a template, each with the values in its path.

    Raises:
        ConfigurationError: If there is none, or the template is not a path below the folder.
    """
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name:
        raise ConfigurationError(f"{name!r} is not allowed; a path below {folder}", key="files")
    pattern = template(name)
    matches = [
        (path, match.groupdict())
        for path in sorted(folder.glob(_glob(name)))
        if (match := pattern.fullmatch(path.relative_to(folder).as_posix()))
    ]
    if not matches:
        raise ConfigurationError(f"no file of {folder} matches {name!r}", key="files")
    return matches


def logged_runs(
    source: Path, files: str | None, columns: Mapping[str, str], named: Mapping[str, Mapping[str, Any]]
) -> tuple[list[LoggedRun], list[Path]]:
    """The runs in a log, or in the logs of a folder, and the files that were read.

    Args:
        source: A log; with `files`, a folder.
        files: Template of the paths of the logs, such as "{arm}-{beta}-{replicate}/trainer_state.json".
        columns: See `add_rows`.
        named: See `add_rows`.

    Raises:
        ConfigurationError: If something cannot be read or is ambiguous; one line with its place.
    """
    runs: Runs = {}
    logs = [(source, {})] if files is None else matching_files(source, files)
    for path, known in logs:
        add_rows(runs, read_rows(path), columns, known, named)
    if not runs:
        raise ConfigurationError(f"{source}: no row has {' or '.join(columns[name] for name in METRICS)}")
    return list(runs.values()), [path for path, _ in logs]


def template(text: str) -> re.Pattern[str]:
    """The pattern of a template with placeholders.

    Example:
        >>> template("{arm}-{beta}/log.csv").fullmatch("k3-in-loss-0.05/log.csv").groupdict()
        {'arm': 'k3-in-loss', 'beta': '0.05'}
    """
    pattern, seen = "", set[str]()
    for index, part in enumerate(_PLACEHOLDER.split(text)):
        if index % 2 == 0:
            pattern += re.escape(part)
        elif part in seen:
            pattern += f"(?P={part})"
        else:
            pattern += f"(?P<{part}>{_NUMBER if part == 'beta' else '[^/]+?'})"
            seen.add(part)
    return re.compile(pattern)


def _glob(name: str) -> str:
    """The pattern of `Path.glob` for a template; adjacent placeholders are one `*`, as `**` is any depth.

    Example:
        >>> _glob("{arm}{beta}/[x].csv")
        '*/[[]x].csv'
    """
    return re.sub(r"\*\*+", "*", "*".join(map(glob.escape, _PLACEHOLDER.split(name)[::2])))


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced.

    Example:
        >>> filled("{arm} - kl", {"arm": "mc"})
        'mc - kl'
    """
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def _label(row: Row, name: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # some exports write every number with a point
    label = str(value).strip()
    if isinstance(value, list | bool) or not label or not label.isprintable():
        raise ConfigurationError(f"{row.place}: {name} is {value!r}; a name or a number is expected")
    return label


def _step(row: Row, columns: Mapping[str, str], cells: Mapping[str, Any]) -> int:
    if "step" not in columns:
        return 0
    if "step" not in cells:
        raise ConfigurationError(f"{row.place}: has no {columns['step']} (step)")
    step = _number(row, columns["step"], cells["step"])
    if not (step.is_integer() and step >= 0):
        raise ConfigurationError(
            f"{row.place}: {columns['step']} is {cells['step']!r}; an integer >= 0 is expected"
        )
    return int(step)


def _number(row: Row, column: str, value: Any) -> float:
    try:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{row.place}: {column} is {value!r}; a number is expected") from None
