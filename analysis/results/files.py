"""Reads files that anybody may have made."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

# The largest file that is read: gradients of several hundred batches take some 100 MB.
LARGEST = 2**28
# What content of the wrong shape raises where it is taken apart.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)


class DamagedFileError(Exception):
    """A file that is not what was written: edited, torn, misplaced, or made by something else."""


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
