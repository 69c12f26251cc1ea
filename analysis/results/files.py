"""Writes files that are there whole or not at all; reads files that anybody may have made."""

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, NoReturn

# How the name of a temporary file ends; it starts with a dot and the name of the file it is written for.
TEMPORARY = ".tmp"
# The largest file that is read: gradients of several hundred batches take some 100 MB.
LARGEST = 2**28


# What content of the wrong shape raises where it is taken apart.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)


class DamagedFileError(Exception):
    """A file that is not what was written: edited, torn, misplaced, or made by something else."""


def publish(path: Path, content: bytes) -> bool:
    """Create `path` with `content`, durably and only if it does not exist yet: the first writer wins.

    The content is complete and on disk before the name appears: it is written to a temporary file in the
    same directory, synced, and linked to `path`, which fails where the name exists. A kill at any moment
    leaves at most the temporary file.

    Returns:
        Whether this call created the file.
    """
    temporary = _written(path, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def replace(path: Path, content: bytes) -> None:
    """Give `path` a new content, durably: a reader sees the old one or the new one, never a mixture."""
    temporary = _written(path, content)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: Path, content: bytes) -> Path:
    """A new temporary file beside `path` with `content` on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def read_bytes(path: Path) -> bytes:
    """The content of a regular file of bounded size; a pipe or a device is never waited for.

    Raises:
        DamagedFileError: If it is not such a file.
        OSError: If it cannot be opened.
    """
    # Without O_NONBLOCK, to open a pipe that nobody writes to would wait forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFileError(f"{path}: is not a regular file")
        if status.st_size > LARGEST:
            raise DamagedFileError(f"{path}: has {status.st_size} bytes; at most {LARGEST} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(LARGEST)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        DamagedFileError: If it is not JSON, holds NaN or an infinity, or is nested too deeply.
        OSError: If it cannot be opened.
    """
    return parse_json(path, read_bytes(path))


def parse_json(path: Path, raw: bytes) -> Any:
    """The JSON content of the file `path`, whose bytes are `raw`; errors as in `read_json`."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        content = json.loads(raw, parse_constant=refuse)
        if b"\\u" in raw:
            # Half a surrogate pair is valid JSON but cannot be written to any page.
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError:
        raise DamagedFileError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error})") from None
