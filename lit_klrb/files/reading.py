"""Reading files of unknown origin."""

import contextlib
import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_klrb.errors import ConfigurationError, brief
from lit_klrb.files.paths import check_target

# The maximum size of a file that is read as a whole; gradients of several hundred batches take about 100 MB.
LARGEST = 2**28


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
