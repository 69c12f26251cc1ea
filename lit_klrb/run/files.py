"""Files that a kill never leaves half written."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at once: a reader, or a kill, sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def csv_text(
    header: Sequence[str], rows: Iterable[Sequence[Any]], quoting: Literal[0, 1, 2, 3] = csv.QUOTE_MINIMAL
) -> str:
    r"""A table in the csv format.

    Args:
        header: Names of the columns.
        rows: Cells.
        quoting: What is quoted, see the module csv. Text of unknown origin needs `QUOTE_NONNUMERIC`: before
            Python 3.13 a carriage return is no reason to quote a cell, and then ends its row.

    Example:
        >>> csv_text(["a", "b"], [[1, "x, y"]])
        'a,b\n1,"x, y"\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
