"""Wall times of cells, which are not part of their reproducible results."""

import json
import os
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path

from analysis.results import layout
from analysis.results.archive import has_archive
from analysis.results.checksum import digest
from analysis.results.files import DamagedFileError, read_bytes, read_json
from analysis.results.sweep import Problem

# The shortest and longest time of a cell in seconds; ratios of others could overflow.
_RANGE = 1e-3, 1e9
# The key of the checksum in `seconds.json`.
_CHECKSUM = "checksum"


def read_time(path: Path) -> float | None:
    """The time in the file of one cell, in seconds; None without a file or a valid time."""
    try:
        return _as_seconds(read_bytes(path))
    except (DamagedFileError, OSError):
        return None


def read_seconds(
    directory: Path, results: Collection[str], known: Collection[str]
) -> tuple[dict[str, float], list[Problem]]:
    """Read the times of the cells with a result, from their working directories or from `seconds.json`.

    Args:
        directory: The sweep's directory.
        results: Ids of the cells with a result.
        known: Ids of all cells, planned or found.

    Returns:
        Cell id -> seconds, and the problems. Neither if the sweep has no times at all.
    """
    try:
        times = _published(directory) if has_archive(directory) else _measured(directory, results)
    except DamagedFileError as error:
        path = directory / layout.TIMES
        return {}, [Problem(str(error).replace(str(path), layout.TIMES, 1), unread=True)]
    except OSError as error:
        return {}, [Problem(f"{layout.TIMES}: {error.strerror}", unread=True)]
    texts = [
        f"{place}: not a time from {_RANGE[0]:g} to {_RANGE[1]:g} seconds"
        for cell_id, (place, seconds) in times.items()
        if seconds is None and cell_id in known
    ]
    if unknown := sorted(times.keys() - set(known)):
        example = reprlib.repr(unknown[0])
        texts.append(f"{layout.TIMES}: {len(unknown)} of its ids are of no cell, such as {example}")
    found = {name: time for name, (_, time) in sorted(times.items()) if time is not None and name in results}
    return found, [Problem(text) for text in texts]


def encode_seconds(seconds: Mapping[str, float]) -> bytes:
    """The content of `seconds.json`: the checksum of the rest, and cell id -> seconds, sorted by id."""
    times = dict(sorted(seconds.items()))
    return json.dumps({_CHECKSUM: digest(times), **times}, indent=1).encode() + b"\n"


def _published(directory: Path) -> dict[str, tuple[str, float | None]]:
    """Cell id -> where its time is, and the time; None if it is not valid."""
    path = directory / layout.TIMES
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path}: not the times of cells")
    checksum = content.pop(_CHECKSUM, None)  # earlier versions wrote none
    try:
        intact = checksum is None or checksum == digest(content)
    except ValueError:
        intact = False
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
