"""Reads logs of other software as rows: CSV, JSON lines, and the JSON written by Hugging Face's trainers."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from analysis.results.keys import flat
from lit_klrb.errors import ConfigurationError

# The key of the rows in a `trainer_state.json`.
HISTORY = "log_history"
FORMATS = ".csv, .jsonl, or .json with a list of rows or a trainer's log_history"


class Row(NamedTuple):
    """One logged row."""

    place: str  # the file and the line, or the number of the row, for messages
    # Column -> value, without empty ones. Keys of nested JSON are joined by dots.
    values: dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a log.

    Args:
        path: A .csv file; a .jsonl file, as written by verl's `file` logger; a .json file with a list of rows
            or, like `trainer_state.json`, with rows under `log_history`.

    Raises:
        ConfigurationError: If the file cannot be read in the format of its suffix; names the place.
    """
    if path.suffix not in (".csv", ".jsonl", ".json"):
        raise ConfigurationError(
            f"{path}: {path.suffix or 'no suffix'} is not allowed; {FORMATS} is expected"
        )
    rows = []
    try:
        text = path.read_bytes().decode("utf-8-sig")  # spreadsheets write a byte order mark
        for where, content in _contents(path, text):
            if not isinstance(content, dict):
                raise ConfigurationError(f"{where}: a mapping of columns to values is expected")
            rows.append(Row(where, {key: value for key, value in flat(content) if value not in (None, "")}))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8") from None
    if not rows:
        raise ConfigurationError(f"{path}: has no rows")
    return rows


def _contents(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The place of each row, and what is there."""
    if path.suffix == ".csv":
        yield from _csv_rows(path, text)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield (where := f"{path}: line {number}"), _parsed(where, line)
    else:
        content = _parsed(str(path), text)
        rows = content.get(HISTORY) if isinstance(content, dict) else content
        if not isinstance(rows, list):
            raise ConfigurationError(f"{path}: a list of rows is expected, or one under {HISTORY}")
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    lines = ([field.strip() for field in fields] for fields in reader)
    filled = (fields for fields in lines if any(fields))
    try:
        header = next(filled, [])
        for name in header:
            if header.count(name) > 1:
                raise ConfigurationError(f"{path}: has the column {name!r} more than once")
        for fields in filled:
            where = f"{path}: line {reader.line_num}"
            if len(fields) != len(header):
                raise ConfigurationError(f"{where}: has {len(fields)} fields, the header {len(header)}")
            yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ConfigurationError(f"{path}: line {reader.line_num}: {error}") from None


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: is not JSON ({error})") from None
