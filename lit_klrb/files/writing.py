"""Atomic and durable writing of files."""

import csv
import glob
import io
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lit_klrb.files.paths import check_replaceable

# Suffix of unfinished files, whose names begin with a dot and the name of the final file.
PARTIAL = ".partial"
# The end of the name of one; of the second name of a checkpoint, and of a weight's own file.
_UNFINISHED = re.compile(rf"\.([0-9a-f]{{16}}|ckpt|weight\.\w+){re.escape(PARTIAL)}$")


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace a file atomically: after a kill or a power failure it has either the old or the new content."""
    partial = write_beside(path, content)
    try:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_output(path: Path, content: str | bytes) -> None:
    """Replace the file that a command was asked for, and remove what killed ones left beside it."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)
    write_atomically(path, content)


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


def write_beside(path: Path, content: str | bytes | memoryview | Callable[[BinaryIO], None]) -> Path:
    """Write the content to an unfinished file beside `path`, on the same file system, and sync it.

    Args:
        path: The final file.
        content: Its content, or what writes it to a file.

    Returns:
        The unfinished file, to be renamed to `path`. It is removed if writing fails.
    """
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            if callable(content):
                content(file)
            else:
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


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Remove the unfinished files of killed processes, which have random names, and no others.

    Args:
        folder: A folder.
        names: Its files, and its folders with all that is in them; links are not followed.
    """
    for name in names:
        path = folder / name
        beside = folder.glob(f".{glob.escape(name)}.*{PARTIAL}")
        within = path.rglob(f".*{PARTIAL}") if path.is_dir() and not path.is_symlink() else ()
        for partial in (*beside, *within):
            if _UNFINISHED.search(partial.name):
                partial.unlink(missing_ok=True)


def csv_text(
    header: Sequence[str], rows: Iterable[Sequence[Any]], quoting: Literal[0, 1, 2, 3] = csv.QUOTE_MINIMAL
) -> str:
    r"""Format a table as CSV.

    Untrusted text needs the quoting `csv.QUOTE_NONNUMERIC`: before Python 3.13, cells with a carriage return
    are not quoted otherwise, and it ends the row.

    Example:
        >>> csv_text(["a", "b"], [[1, "x, y"]])
        'a,b\n1,"x, y"\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
