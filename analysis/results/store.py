"""Files of a sweep: read, unpacked, hashed, checked against their checksum, written.

Results are single files, or the lines of one archive, sorted by id, where a sweep was published. Readers take
.gz and .xz wherever they take the plain file.
"""

import gzip
import hashlib
import io
import json
import lzma
import os
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import rfc8785
from pydantic import Field, Strict, TypeAdapter, ValidationError

from analysis.results import layout
from analysis.results.layout import RESULT_SCHEMA
from lit_klrb.errors import ConfigurationError, DamagedFileError as DamagedFileError

# The exceptions that content of the wrong structure can raise; types raise a `ValidationError`, a ValueError.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
_UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}
# The time of a cell in seconds; ratios of shorter or longer ones could overflow.
_Time = Annotated[float, Field(ge=1e-3, le=1e9)]
_TIME: TypeAdapter[float] = TypeAdapter(_Time)
_TIMES: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, Annotated[_Time, Strict()]])
# Shows values of any size in messages.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
# The key of the checksum in results and in `seconds.json`, and what is wrong where it does not match.
CHECKSUM = "checksum"
_CHANGED = "does not match its checksum; it was changed after it was published"


def canonical(content: object) -> bytes:
    """The RFC 8785 canonical JSON of `content`, of which all ids, checksums and locks are hashes.

    Raises:
        ValueError: If `content` holds NaN, an infinity, an integer beyond 2**53, or a key that is no string.
    """
    return rfc8785.dumps(content)  # type: ignore[arg-type]  # checked at run time


def digest(content: object) -> str:
    """SHA-256, in hex, of the canonical JSON of `content`.

    Example:
        >>> digest({"b": 1, "a": 0.10}) == digest({"a": 1e-1, "b": 1.0})
        True
        >>> digest({"a": 0.1}) == digest({"a": "0.1"})
        False
    """
    return hashlib.sha256(canonical(content)).hexdigest()


def reason(error: Exception) -> str:
    """One line on content of the wrong structure: key, value and what is allowed where a type says so."""
    if isinstance(error, ValidationError):
        return error_lines(error)[0]
    return f"{type(error).__name__}: {error}"


def error_lines(error: ValidationError, of_type: Any = None) -> list[str]:
    """Each error of a type in one line with key, value and what is allowed; unknown keys first."""
    lines: dict[str, bool] = {}
    for one in error.errors(include_url=False, include_context=False):
        path, message = [str(part) for part in one["loc"]], one["msg"].removeprefix("Value error, ")
        if path and path[-1] == "[key]":  # the error of a key is about the mapping that has it
            path = path[:-2]
        key, unknown = ".".join(path), one["type"] in ("unexpected_keyword_argument", "extra_forbidden")
        if unknown:
            known = ", ".join(_keys(of_type, path[:-1]))
            line = f"{key}: there is no such key{known and '; one of: '}{known}"
        elif one["type"].startswith("missing"):
            line = f"{key}: is missing"
        else:
            message = message.removeprefix("Input should be ").replace(" after validation", "")
            line = f"{key}: {_SHORT.repr(one['input'])} is not allowed; {message}"
        lines[line.removeprefix(": ")] = not unknown
    return sorted(lines, key=lambda line: lines[line])


def _keys(of_type: Any, path: list[str]) -> list[str]:
    """The keys of the data class to which a path leads from another one; none where it leads elsewhere."""
    for part in path:
        hints = get_type_hints(of_type) if is_dataclass(of_type) else {}
        of_type = hints.get(part) or (get_args(of_type) or (None,))[-1]
        of_type = get_args(of_type)[0] if type(None) in get_args(of_type) else of_type
    return [one.name for one in fields(of_type)] if is_dataclass(of_type) else []


def present(path: Path) -> Path:
    """The path of a file that may be compressed: with .gz or .xz where only that exists.

    Raises:
        ConfigurationError: If several exist.
    """
    names = [path.name, *(path.name + end for end in _UNPACK)]
    there = [name for name in names if os.path.lexists(path.with_name(name))]
    if len(there) > 1:
        raise ConfigurationError(f"{path.parent}: has both {there[0]} and {there[1]}; remove one of the two")
    return path.with_name(there[0]) if there else path


def read_bytes(path: Path) -> bytes:
    """Read a file; .gz and .xz are unpacked.

    Raises:
        DamagedFileError: If it cannot be unpacked.
        OSError: If it cannot be opened.
    """
    content = path.read_bytes()
    if path.suffix not in _UNPACK:
        return content
    try:
        return _UNPACK[path.suffix](content)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DamagedFileError(f"{path}: cannot be unpacked ({error})") from None


def read_json(path: Path, raw: bytes | None = None) -> Any:
    """The content of a JSON file, or of what was read of it before.

    Raises:
        DamagedFileError: If it is not JSON.
        OSError: If it cannot be opened.
    """
    try:
        return json.loads(read_bytes(path) if raw is None else raw)
    except ValueError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error})") from None


def encode_result(result: dict[str, Any]) -> bytes:
    """The bytes of a published result: canonical JSON with its checksum inside."""
    return canonical({**result, CHECKSUM: digest(result)})


def read_result(path: Path, line: bytes | None = None) -> dict[str, Any]:
    """Read a published result and check it against its checksum, its schema, and the name of its file."""
    raw = read_bytes(path) if line is None else line
    content = read_json(path, raw)
    checksum = content.get(CHECKSUM) if isinstance(content, dict) else None
    # Canonical JSON without this member is canonical too, so it need not be formatted again
    rest = raw.replace(f'"{CHECKSUM}":"{checksum}",'.encode(), b"", 1)
    if hashlib.sha256(rest).hexdigest() != checksum:
        raise DamagedFileError(f"{path}: {_CHANGED}")
    if (version := content.get("schema")) != RESULT_SCHEMA:
        raise DamagedFileError(f"{path}: has schema {version!r}; this version reads {RESULT_SCHEMA}")
    if line is None and content.get("id") != path.stem:
        raise DamagedFileError(f"{path}: holds the result of another cell, {content.get('id')!r}")
    return dict(content)


def archive_path(directory: Path) -> Path:
    """The path of the archive, compressed or not; that of one not compressed if there is none."""
    return present(directory / layout.ARCHIVE)


def has_archive(directory: Path) -> bool:
    """Whether the results of a sweep are in one file.

    Raises:
        ConfigurationError: If there are single results beside it, or it is there twice.
    """
    path = archive_path(directory)
    exists = os.path.lexists(path)
    if exists and layout.result_paths(directory):
        both = f"{path.name} and {layout.RESULTS}/"
        raise ConfigurationError(f"{directory}: has both {both}; remove one of the two")
    return exists


def archive_lines(directory: Path) -> Iterator[tuple[Path, bytes]]:
    """The results of an archive as written: path and number of a line, its content.

    Raises:
        DamagedFileError: If it cannot be unpacked, or has an empty line.
    """
    path = archive_path(directory)
    for number, line in enumerate(io.BytesIO(read_bytes(path)), start=1):
        if line == b"\n":
            raise DamagedFileError(f"{path}: line {number} is empty")
        yield path / f"line {number}", line.rstrip(b"\n")


def encode_seconds(seconds: Mapping[str, float]) -> bytes:
    """The content of `seconds.json`: the checksum of the rest, and cell id -> seconds, sorted by id."""
    times = dict(sorted(seconds.items()))
    return json.dumps({CHECKSUM: digest(times), **times}, indent=1).encode() + b"\n"


def read_time(path: Path) -> float | None:
    """The time in the file of one cell, in seconds; None without a file or a valid time."""
    try:
        return _TIME.validate_strings(read_bytes(path).decode())
    except (DamagedFileError, OSError, ValueError):
        return None


def published_seconds(path: Path) -> dict[str, float]:
    """Cell id -> seconds from `seconds.json`; empty without it.

    Raises:
        DamagedFileError, OSError: If it cannot be read.
    """
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    try:
        intact = content.pop(CHECKSUM) == digest(content)
        times = _TIMES.validate_python(content)
    except MALFORMED as error:
        raise DamagedFileError(f"{path}: not the times of cells with a checksum ({reason(error)})") from None
    if not intact:
        raise DamagedFileError(f"{path}: {_CHANGED}")
    return times
