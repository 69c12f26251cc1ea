"""Files that a kill never leaves half written."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at once: a reader, or a kill, sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""A table in the csv format.

    Example:
        >>> csv_text(["a", "b"], [[1, "x, y"]])
        'a,b\n1,"x, y"\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
