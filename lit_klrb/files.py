"""Files that a kill, or a full disk, never leaves half written. For runs and for sweeps; imports nothing."""

import csv
import io
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

# How the name of an unfinished file ends; it begins with a dot and the name of the file it is written for.
PARTIAL = ".partial"


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace the file at once: a reader, a kill or a power cut sees the old content or the new."""
    partial = write_beside(path, content)
    try:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_once(path: Path, content: bytes) -> bool:
    """Create the file, durably and only if it does not exist yet: the first writer wins.

    The content is complete and on disk before the name appears: the unfinished file is linked to `path`,
    which fails where the name exists. A kill at any moment leaves at most the unfinished file.

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
    """Write the content to disk in an unfinished file of its own beside `path`, on the same file system.

    Returns:
        The unfinished file, to be renamed to `path`. It is removed where writing fails.
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
    """Wait until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
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
