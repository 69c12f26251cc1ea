"""Reading files from untrusted sources."""

import json
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lit_klrb.errors import ConfigurationError
from lit_klrb.files import LARGEST as LARGEST, read_regular

# The exceptions that content of the wrong structure can raise.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)

# The most memory that unpacking a file may take, in bytes.
_MEMORY = 2**27
# What unpacks a file, by the end of its name.
_UNPACKING: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY),
}


class DamagedFileError(Exception):
    """A file that was edited, truncated, misplaced, or written by something else."""


def read_bytes(path: Path) -> bytes:
    """Read a regular file of bounded size without waiting for pipes or devices; .gz and .xz are unpacked.

    Raises:
        DamagedFileError: If it is not such a file.
        OSError: If it cannot be opened.
    """
    try:
        content = read_regular(path)
    except ConfigurationError as error:
        raise DamagedFileError(f"{path}: {error}") from None
    return _unpacked(path, content) if path.suffix in _UNPACKING else content


def present(path: Path) -> Path:
    """The path of a file that may be compressed: with .gz or .xz where only that exists.

    Raises:
        ConfigurationError: If several exist.
    """
    names = [path.name, *(path.name + end for end in _UNPACKING)]
    there = [name for name in names if os.path.lexists(path.with_name(name))]
    if len(there) > 1:
        raise ConfigurationError(f"{path.parent}: has both {there[0]} and {there[1]}; remove one of the two")
    return path.with_name(there[0]) if there else path


def _unpacked(path: Path, content: bytes) -> bytes:
    # A small file may unpack to any size
    unpacking = _UNPACKING[path.suffix]()
    try:
        unpacked: bytes = unpacking.decompress(content, LARGEST + 1)
    except (lzma.LZMAError, zlib.error) as error:
        raise DamagedFileError(f"{path}: cannot be unpacked ({error})") from None
    if len(unpacked) > LARGEST:
        raise DamagedFileError(f"{path}: unpacks to more than {LARGEST} bytes, the most that are read")
    if not unpacking.eof or unpacking.unused_data:
        raise DamagedFileError(f"{path}: cannot be unpacked (cut, or with other content behind it)")
    return unpacked


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DamagedFileError: If it is not JSON, contains NaN or an infinity, or is nested too deeply.
        OSError: If it cannot be opened.
    """
    return parse_json(path, read_bytes(path))


def parse_json(path: Path, raw: bytes) -> Any:
    """Parse `raw`, the content of the JSON file `path`; errors as in `read_json`."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        content = json.loads(raw, parse_constant=refuse)
        if b"\\u" in raw:
            # A lone surrogate is valid JSON but cannot be written to a page
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError:
        raise DamagedFileError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error})") from None
