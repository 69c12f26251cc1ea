"""Reading .jsonl and .parquet files as columns; errors name the file and the line."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_klrb.errors import ConfigurationError, concerning, refusing

# The maximum size of a file of text, which as Python's objects takes several times the memory.
LARGEST = 2**31


@dataclass(frozen=True)
class Rows:
    """A table with the part of the interface of `datasets.Dataset` that this package uses.

    Args:
        columns: Values by column name, all of the same length; None for missing values.
    """

    columns: dict[str, list[Any]]

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return list(self.columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)


def read_rows(key: str, path: Path) -> Rows:
    """Read the rows of a file.

    Args:
        key: The argument that names it, for the error message.
        path: A .jsonl or .parquet file.

    Raises:
        ConfigurationError: If it is not such a file, or cannot be read.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist", key=key)
    if path.suffix not in READERS or not path.is_file():
        hint = CONVERSIONS.get(path.suffix.lower(), "")
        raise ConfigurationError(f"{path} is not a {' or '.join(READERS)} file{hint}", key=key)
    with concerning(f"{path} cannot be read", OSError, ValueError, key=key):
        return READERS[path.suffix](path)


def read_lines(path: Path) -> list[str]:
    """The lines of a file of bounded size in UTF-8.

    Raises:
        ConfigurationError: If it is larger, or encoded otherwise; names the line.
        OSError: If it cannot be read.
    """
    if (size := path.stat().st_size) > LARGEST:
        raise ConfigurationError(
            f"it has {size} bytes; at most {LARGEST} are read, and more from .parquet files"
        )
    try:
        # Not splitlines, which also ends lines at form feeds and other characters within a text
        return path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"it is not encoded in UTF-8: {error.reason} in line {line}; if it is Latin-1: "
            f"iconv -f latin1 -t utf-8 {path.name} > utf8{path.suffix}"
        ) from None


def _read_jsonl(path: Path) -> Rows:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        with refusing(f"line {number}", ValueError, RecursionError):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise ConfigurationError(f"line {number}: a JSON object is expected, got {line[:50]}")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return Rows({name: [row.get(name) for row in rows] for name in names})


def _read_parquet(path: Path) -> Rows:
    from pyarrow import parquet  # slow to import, and rarely needed

    return Rows(parquet.read_table(path).to_pydict())


_CONVERT = "; convert it in Python: pandas.{reader}.to_json('texts.jsonl', orient='records', lines=True)"
# Hints how to convert files of other formats, by suffix.
CONVERSIONS = {
    ".csv": _CONVERT.format(reader="read_csv(FILE)"),
    ".tsv": _CONVERT.format(reader="read_csv(FILE, sep='\\t')"),
    ".json": _CONVERT.format(reader="read_json(FILE)"),
    ".txt": '; one JSON object per line is expected: {"text": ...}',
}
READERS: dict[str, Callable[[Path], Rows]] = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
