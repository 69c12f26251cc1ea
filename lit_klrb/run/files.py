"""Files that a kill, or a full disk, never leaves half written."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

# How the name of an unfinished file ends; it begins with a dot and the name of the file it is written for.
PARTIAL = ".partial"


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace the file at once: a reader, a kill or a power cut sees the old content or the new."""
    partial = write_beside(path, content)
    partial.replace(path)
    sync_folder(path.parent)


def write_beside(path: Path, content: str | bytes | memoryview) -> Path:
    """Write the content to disk in an unfinished file beside `path`, on the same file system.

    Returns:
        The unfinished file, to be renamed to `path`. It is removed where writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files that killed processes left in a folder, however deep."""
    for partial in folder.rglob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


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
