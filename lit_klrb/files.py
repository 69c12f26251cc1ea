"""Atomic writing of files, and locks, for runs and for sweeps."""

import contextlib
import csv
import fcntl
import glob
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lit_klrb.errors import ConfigurationError, brief

# Suffix of unfinished files, whose names begin with a dot and the name of the final file.
PARTIAL = ".partial"
# The end of the name of one; of the second name of a checkpoint, and of a weight's own file.
_UNFINISHED = re.compile(rf"\.([0-9a-f]{{16}}|ckpt|weight\.\w+){re.escape(PARTIAL)}$")
# In the hidden folder of an unfinished folder: the file with the lock and its content, and what is replaced.
_MARK, _MARKED, _EARLIER = "unfinished", b"an unfinished folder of lit_klrb\n", "earlier"
# The maximum size of a file that is read as a whole; gradients of several hundred batches take about 100 MB.
LARGEST = 2**28


def local_path(text: str, key: str | None = None) -> Path:
    """The path that a text names on this machine, with `~` expanded.

    Raises:
        ConfigurationError: If it has a null character, is the address of a remote file, or begins with the
            home of a user that does not exist.
    """
    if "\0" in text:
        raise ConfigurationError(f"{text!r} is not a path: it has a null character", key=key)
    if "://" in text:
        raise ConfigurationError(f"{text} is an address; the path of a local file is expected", key=key)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigurationError(f"{text}: there is no such user", key=key)
    return Path(expanded)


def read_regular(path: Path, largest: int = LARGEST) -> bytes:
    """Read a regular file of bounded size, without waiting for pipes or devices.

    Raises:
        ConfigurationError: If it is not such a file; without the path, which the caller adds.
        OSError: If it cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would wait forever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError("is not a regular file")
        if status.st_size > largest:
            raise ConfigurationError(f"has {status.st_size} bytes; at most {largest} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(min(largest, status.st_size))  # memory for all of it is taken first
    finally:
        os.close(descriptor)


def read_object(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """The JSON object in a regular file of bounded size; an empty one if there is none or it is damaged."""
    with contextlib.suppress(OSError, ConfigurationError):
        return parse_object(read_regular(path, largest))
    return {}


def parse_object(content: bytes) -> dict[str, Any]:
    """A JSON object of unknown origin; an empty one if it is damaged, or no object."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(content)
        return value if isinstance(value, dict) else {}
    return {}


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_target(path: Path, key: str | None = None) -> None:
    """Check that a path is free or an ordinary file, not a link or a device, in a writable directory."""
    _check_replaceable(path, key)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        problem = f"{folder} is not a directory that can be written"
        raise ConfigurationError(f"{path} cannot be written: {problem}", key=key)


def check_own(path: Path, is_own: Callable[[dict[str, Any]], bool], key: str | None = None) -> None:
    """Check that a path is free, or a file whose first line is a JSON object that this package wrote.

    Args:
        path: A file that is written without being named.
        is_own: Whether an object is one of this package's.
        key: The argument that chooses its directory.
    """
    check_target(path, key)
    if path.exists():
        with path.open("rb") as file:
            line = file.readline(LARGEST)
        if line and not is_own(parse_object(line)):
            raise ConfigurationError(f"{path} holds something else; name another directory", key=key)


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
    _check_replaceable(path)
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


def _check_replaceable(path: Path, key: str | None = None) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigurationError(f"{path} is a link or not a file; name a new or an ordinary file", key=key)


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


@contextlib.contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder beside `target`, to be filled; after the block it is moved to its place.

    It lies in a hidden folder with a random name, a mark of this package and a lock that the kernel releases
    with the process. Those of killed processes with the same target are removed first: only folders with the
    mark whose lock is free.

    Args:
        target: Where the folder is moved to: a new name or an empty folder.
        replace: Whether to replace a folder there, which is removed only after that. Otherwise, a folder that
            another process has made meanwhile stays.

    Yields:
        The folder to fill. It is removed if the block raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    outer = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    outer.mkdir()
    try:
        with (outer / _MARK).open("xb", buffering=0) as mark:
            with contextlib.suppress(OSError):  # without locks, nobody may know it as abandoned
                if try_lock(mark.fileno()):
                    mark.write(_MARKED)
            (outer / "new").mkdir()
            yield outer / "new"
            if replace and target.exists():
                target.rename(outer / _EARLIER)
            try:
                (outer / "new").rename(target)  # replaces an empty folder
            except OSError:
                if replace or not target.is_dir():
                    raise
    finally:
        _remove_unfinished_folder(outer, target)


def remove_abandoned(target: Path) -> list[Path]:
    """Remove what killed processes left of `new_folder(target)`, and return it."""
    removed = []
    for outer in target.parent.glob(f".{glob.escape(target.name)}.*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(outer / _MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb", buffering=0) as mark:
                # The mark is written under the lock
                if outer.is_symlink() or mark.read(99) != _MARKED or not try_lock(descriptor):
                    continue
            _remove_unfinished_folder(outer, target)
            removed.append(outer)
    return removed


def _remove_unfinished_folder(outer: Path, target: Path) -> None:
    """Remove it, after moving back an earlier folder whose place is still free."""
    if (outer / _EARLIER).exists() and not target.exists():
        (outer / _EARLIER).rename(target)
    shutil.rmtree(outer, ignore_errors=True)


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


def try_lock(descriptor: int) -> bool:
    """Lock an open file or directory; False if another process has. The kernel releases it when it is closed.

    Raises:
        OSError: If its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Wait until no other process is in a block with the lock of this directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Lock a directory, which is no link, until the end of the block or of the process.

    Yields:
        Whether it was free.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path) -> str | None:
    """A description of the damage of a checkpoint; None if it is intact.

    A checkpoint is a zip archive with a CRC-32 for each record, which `torch.load` does not check.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except Exception as error:  # damaged headers raise all kinds of exceptions
        return f"not a checkpoint, or a truncated one: {brief(error)}"
    return record and f"damaged: {record} does not match its checksum"
