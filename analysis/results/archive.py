"""All published results of a sweep in one file, for publication: one result per line, sorted by id."""

import os
from pathlib import Path

from analysis.results import layout
from analysis.results.files import read_bytes
from lit_klrb.errors import ConfigurationError


def has_archive(directory: Path) -> bool:
    """Whether the results of a sweep are in one file.

    Raises:
        ConfigurationError: If there are single results beside it.
    """
    if not os.path.lexists(directory / layout.ARCHIVE):
        return False
    if layout.result_paths(directory):
        raise ConfigurationError(
            f"{directory}: has both {layout.ARCHIVE} and {layout.RESULTS}/; remove one of the two"
        )
    return True


def archive_lines(directory: Path) -> dict[Path, bytes]:
    """The results of an archive as written: the path and number of a line -> its content.

    Raises:
        DamagedFileError: If it is not a regular file.
    """
    path = directory / layout.ARCHIVE
    lines = read_bytes(path).split(b"\n")
    return {path / f"line {number}": line for number, line in enumerate(lines, start=1) if line}
