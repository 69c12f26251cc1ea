"""Files of a sweep: read from untrusted sources, unpacked, hashed, checked against their checksum, written.

Results are single files, or the lines of one archive, sorted by id, where a sweep was published. Every file
may be compressed; readers take .gz and .xz wherever they take the plain file.
"""

import hashlib
import json
import lzma
import os
import reprlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import rfc8785
from pydantic import ValidationError

from analysis.results import layout
from analysis.results.layout import RESULT_SCHEMA
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import LARGEST as LARGEST, read_regular

# The exceptions that content of the wrong structure can raise; types raise a `ValidationError`, a ValueError.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
# The most memory that unpacking a file may take, the bytes that are unpacked at a time, and the most empty
# lines of an archive, which no sweep writes.
_MEMORY, _PIECE, _EMPTY_LINES = 2**27, 2**20, 1000
# What unpacks a file, by the end of its name.
_UNPACKING: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY),
}
# The shortest and longest time of a cell in seconds; ratios of others could overflow.
_RANGE = 1e-3, 1e9
# Shows values of any size in messages.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
# The key of the checksum in results and in `seconds.json`.
CHECKSUM = "checksum"


class DamagedFileError(Exception):
    """A file that was edited, truncated, misplaced, or written by something else."""


def canonical(content: object) -> bytes:
    """The RFC 8785 canonical JSON of `content`, of which all ids, checksums and locks are hashes.

    Raises:
        ValueError: If `content` holds NaN, an infinity, an integer beyond 2**53, a key that is not a string,
            or is nested too deeply.
    """
    try:
        return rfc8785.dumps(content)  # type: ignore[arg-type]  # checked at run time
    except RecursionError:
        raise ValueError("nested too deeply") from None


def digest(content: object) -> str:
    """SHA-256, in hex, of the canonical JSON of `content`.

    Raises:
        ValueError: If `content` has no canonical JSON.

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


def error_lines(error: ValidationError, kind: Any = None) -> list[str]:
    """Each error of a type in one line with key, value and what is allowed; unknown keys first.

    Args:
        error: The errors.
        kind: The type, for the keys that are known.
    """
    lines: dict[str, bool] = {}
    for one in error.errors(include_url=False, include_context=False):
        path, message = [str(part) for part in one["loc"]], one["msg"].removeprefix("Value error, ")
        if path and path[-1] == "[key]":  # the error of a key is about the mapping that has it
            path = path[:-2]
        key, unknown = ".".join(path), one["type"] in ("unexpected_keyword_argument", "extra_forbidden")
        if unknown:
            known = ", ".join(_keys(kind, path[:-1]))
            line = f"{key}: there is no such key{known and '; one of: '}{known}"
        elif one["type"].startswith("missing"):
            line = f"{key}: is missing"
        else:
            message = message.removeprefix("Input should be ").replace(" after validation", "")
            line = f"{key}: {_SHORT.repr(one['input'])} is not allowed; {message}"
        lines[line.removeprefix(": ")] = not unknown
    return sorted(lines, key=lambda line: lines[line])


def _keys(kind: Any, path: list[str]) -> list[str]:
    """The keys of the data class to which a path leads from another one; none where it leads elsewhere."""
    for part in path:
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        kind = hints.get(part) or (get_args(kind) or (None,))[-1]
        if type(None) in get_args(kind):
            kind, _ = get_args(kind)
    return [one.name for one in fields(kind)] if is_dataclass(kind) else []


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


def read_bytes(path: Path) -> bytes:
    """Read a regular file of bounded size without waiting for pipes or devices; .gz and .xz are unpacked.

    Raises:
        DamagedFileError: If it is not such a file.
        OSError: If it cannot be opened.
    """
    return b"".join(_pieces(path))


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, unpacked in pieces: a small file may unpack to any size."""
    try:
        content = read_regular(path)
    except ConfigurationError as error:
        raise DamagedFileError(f"{path}: {error}") from None
    if path.suffix not in _UNPACKING:
        yield content
        return
    unpacking, size = _UNPACKING[path.suffix](), 0
    try:
        while not unpacking.eof:
            piece: bytes = unpacking.decompress(content, _PIECE)
            content = getattr(unpacking, "unconsumed_tail", b"")  # zlib hands it back, lzma keeps it
            size += len(piece)
            if size > LARGEST:
                raise DamagedFileError(
                    f"{path}: unpacks to more than {LARGEST} bytes, the most that are read"
                )
            if not piece and not content:
                break
            yield piece
    except (lzma.LZMAError, zlib.error) as error:
        raise DamagedFileError(f"{path}: cannot be unpacked ({error})") from None
    if not unpacking.eof or unpacking.unused_data:
        raise DamagedFileError(f"{path}: cannot be unpacked (cut, or with other content behind it)")


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


def encode_result(result: dict[str, Any]) -> bytes:
    """The bytes of a published result: canonical JSON with its checksum inside.

    Args:
        result: The result without its checksum.
    """
    return canonical({**result, CHECKSUM: digest(result)})


def read_result(path: Path) -> dict[str, Any]:
    """Read a published result and check it against its checksum and its name.

    Raises:
        DamagedFileError: If the file is not what was published.
    """
    content = decode_result(path, read_bytes(path))
    if content.get("id") != path.stem:
        raise DamagedFileError(f"{path}: holds the result of another cell, {content.get('id')!r}")
    return content


def decode_result(path: Path, raw: bytes) -> dict[str, Any]:
    """A result that matches its checksum and has the known schema.

    Args:
        path: The file, or the archive with the number of the line, for messages.
        raw: Its content.
    """
    content = parse_json(path, raw)
    try:
        # Canonical JSON without this member is canonical too, so it need not be formatted again
        rest = raw.replace(b'"checksum":"%s",' % content[CHECKSUM].encode(), b"", 1)
        intact = hashlib.sha256(rest).hexdigest() == content[CHECKSUM]
    except MALFORMED:
        intact = False
    if not intact:
        raise DamagedFileError(f"{path}: does not match its checksum; it was changed after it was published")
    if content.get("schema") != RESULT_SCHEMA:
        found = content.get("schema")
        raise DamagedFileError(f"{path}: has schema {found!r}; this version reads {RESULT_SCHEMA}")
    return dict(content)


def encode_failure(cell_id: str, cell: dict[str, Any], attempts: int, error: str) -> bytes:
    """The content of the record that a cell ended without a result."""
    record = {"id": cell_id, "cell": cell, "attempts": attempts, "error": error}
    return json.dumps(record, indent=1).encode()


def archive_path(directory: Path) -> Path:
    """The path of the archive, compressed or not; that of one not compressed if there is none."""
    return present(directory / layout.ARCHIVE)


def has_archive(directory: Path) -> bool:
    """Whether the results of a sweep are in one file.

    Raises:
        ConfigurationError: If there are single results beside it, or it is there twice.
    """
    path = archive_path(directory)
    if not os.path.lexists(path):
        return False
    if layout.result_paths(directory):
        raise ConfigurationError(
            f"{directory}: has both {path.name} and {layout.RESULTS}/; remove one of the two"
        )
    return True


def archive_lines(directory: Path) -> Iterator[tuple[Path, bytes]]:
    """The results of an archive as written, while it is unpacked: path and number of a line, its content.

    Raises:
        DamagedFileError: If it is not a regular file, cannot be unpacked, or has more empty lines than any
            sweep would write.
    """
    path, number, empty = archive_path(directory), 0, 0
    started: list[bytes] = []
    for piece in _pieces(path):
        first, *others = piece.split(b"\n")
        started.append(first)
        if not others:
            continue
        lines = [b"".join(started), *others[:-1]]
        started = others[-1:]
        empty += lines.count(b"")
        if empty > _EMPTY_LINES:
            raise DamagedFileError(f"{path}: has more than {_EMPTY_LINES} empty lines")
        yield from ((path / f"line {number + i}", line) for i, line in enumerate(lines, 1) if line)
        number += len(lines)
    if rest := b"".join(started):
        yield path / f"line {number + 1}", rest


def encode_seconds(seconds: Mapping[str, float]) -> bytes:
    """The content of `seconds.json`: the checksum of the rest, and cell id -> seconds, sorted by id."""
    times = dict(sorted(seconds.items()))
    return json.dumps({CHECKSUM: digest(times), **times}, indent=1).encode() + b"\n"


def read_time(path: Path) -> float | None:
    """The time in the file of one cell, in seconds; None without a file or a valid time."""
    try:
        return _as_seconds(read_bytes(path))
    except (DamagedFileError, OSError):
        return None


def read_seconds(
    directory: Path, results: Collection[str], known: Collection[str]
) -> tuple[dict[str, float], list[str]]:
    """Read the times of the cells with a result, from their working directories or from `seconds.json`.

    Args:
        directory: The sweep's directory.
        results: Ids of the cells with a result.
        known: Ids of all cells, planned or found.

    Returns:
        Cell id -> seconds, and one line on each problem. Neither if the sweep has no times at all.

    Raises:
        DamagedFileError, OSError: If `seconds.json` cannot be read.
    """
    times = _published(directory) if has_archive(directory) else _measured(directory, results)
    texts = [
        f"{place}: not a time from {_RANGE[0]:g} to {_RANGE[1]:g} seconds"
        for cell_id, (place, seconds) in times.items()
        if seconds is None and cell_id in known
    ]
    if unknown := sorted(times.keys() - set(known)):
        example = reprlib.repr(unknown[0])
        texts.append(f"{layout.TIMES}: {len(unknown)} of its ids are of no cell, such as {example}")
    found = {name: time for name, (_, time) in sorted(times.items()) if time is not None and name in results}
    return found, texts


def _published(directory: Path) -> dict[str, tuple[str, float | None]]:
    """Cell id -> where its time is, and the time; None if it is not valid."""
    path = directory / layout.TIMES
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    try:
        intact = content.pop(CHECKSUM) == digest(content)
    except MALFORMED:
        raise DamagedFileError(f"{path}: not the times of cells with their checksum") from None
    if not intact:
        raise DamagedFileError(f"{path}: does not match its checksum; it was changed after it was published")
    return {cell_id: (f"{layout.TIMES}: {cell_id}", _as_seconds(time)) for cell_id, time in content.items()}


def _measured(directory: Path, results: Collection[str]) -> dict[str, tuple[str, float | None]]:
    """As `_published`, from the working directories of cells."""
    paths = {cell_id: layout.workdir(directory, cell_id) / layout.SECONDS for cell_id in results}
    return {
        cell_id: (str(path.relative_to(directory)), read_time(path))
        for cell_id, path in paths.items()
        if os.path.lexists(path)
    }


def _as_seconds(value: object) -> float | None:
    """The number in a file, or of a JSON document; None if it is not a time."""
    if isinstance(value, bool) or not isinstance(value, int | float | bytes):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if _RANGE[0] <= seconds <= _RANGE[1] else None
