"""Atomic writing of files, for runs and for sweeps."""

import csv
import io
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

# Suffix of unfinished files, whose names begin with a dot and the name of the final file.
PARTIAL = ".partial"


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace a file atomically: after a kill or a power failure it has either the old or the new content."""
    partial = write_beside(path, content)
    try:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_once(path: Path, content: bytes) -> bool:
    """Create a file durably if it does not exist yet; of several writers the first wins.

    The content is on disk before the name appears: an unfinished file is linked to `path`, which fails if the
    name exists. A kill leaves at most the unfinished file.

    Returns:
        Whether this call created the file.
    """
    partial = write_beside(path, content)
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)
    return True


def write_beside(path: Path, content: str | bytes | memoryview) -> Path:
    """Write the content to an unfinished file beside `path`, on the same file system, and sync it.

    Returns:
        The unfinished file, to be renamed to `path`. It is removed if writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def sync(path: Path) -> None:
    """Wait until the content of a file or a folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed processes from a folder and its subfolders."""
    for partial in folder.rglob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def csv_text(
    header: Sequence[str], rows: Iterable[Sequence[Any]], quoting: Literal[0, 1, 2, 3] = csv.QUOTE_MINIMAL
) -> str:
    r"""Format a table as CSV.

    Args:
        header: Names of the columns.
        rows: Cells.
        quoting: A constant of the module csv. Untrusted text needs `QUOTE_NONNUMERIC`: before Python 3.13,
            cells with a carriage return are not quoted otherwise, and it ends the row.

    Example:
        >>> csv_text(["a", "b"], [[1, "x, y"]])
        'a,b\n1,"x, y"\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
