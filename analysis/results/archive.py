"""All published results of a sweep in one file, for publication: one result per line, sorted by id.

It may be compressed: results.jsonl.xz or results.jsonl.gz.
"""

import os
from pathlib import Path

from analysis.results import layout
from analysis.results.files import present, read_bytes
from lit_klrb.errors import ConfigurationError


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


def archive_path(directory: Path) -> Path:
    """The path of the archive, compressed or not; that of one not compressed if there is none."""
    return present(directory / layout.ARCHIVE)


def archive_lines(directory: Path) -> dict[Path, bytes]:
    """The results of an archive as written: the path and number of a line -> its content.

    Raises:
        DamagedFileError: If it is not a regular file, or cannot be unpacked.
    """
    path = archive_path(directory)
    lines = read_bytes(path).split(b"\n")
    return {path / f"line {number}": line for number, line in enumerate(lines, start=1) if line}
