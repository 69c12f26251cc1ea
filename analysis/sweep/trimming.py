"""Removal of the working files of published cells, most of which are no longer needed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lit_klrb import schema
from lit_klrb.files import claimed, read_object

# Maximum size in bytes; the files of the cells with the oldest results are removed.
LIMIT = 10_000_000_000


def trim(sweep: Path, limit: int = LIMIT) -> None:
    """Remove the folders of published cells (checkpoints, metrics, studies), oldest result first.

    Files at the top level of a cell's directory, such as its configuration and its log, are not removed, nor
    is the latest checkpoint of a stage from which other cells start. Cells without a result, which the next
    sweep resumes, running cells and results are not changed.
    """
    files = {cell: dict(_removable(cell)) for cell in _published(sweep)}
    left = sum(sum(sizes.values()) for sizes in files.values())
    for cell, sizes in files.items():
        if left <= limit:
            break
        with claimed(cell) as free:
            if not free:
                continue
            for path in sizes:
                path.unlink(missing_ok=True)
            _remove_empty_folders(cell)
        left -= sum(sizes.values())


def _published(sweep: Path) -> list[Path]:
    """The working directories of published cells, oldest result first; links are not followed."""
    results = sorted((sweep / schema.RESULTS).glob("*.json"), key=lambda path: path.lstat().st_mtime_ns)
    cells = sweep.resolve() / schema.CELLS
    # A name such as `...json` stands for a directory above
    named = (cells / path.stem for path in results if path.stem not in (".", ".."))
    return [cell for cell in named if cell.is_dir() and cell.resolve() == cell]


def _removable(cell: Path) -> Iterator[tuple[Path, int]]:
    """The files in a cell's folders with their sizes, except a checkpoint from which others may start."""
    kept = cell / schema.CHECKPOINT if _is_shared(cell) else None
    for folder, _, names in os.walk(cell):  # links are not followed
        for path in (Path(folder, name) for name in names if Path(folder) != cell):
            if path != kept:
                with contextlib.suppress(OSError):  # another process may remove it
                    yield path, path.lstat().st_size


def _is_shared(cell: Path) -> bool:
    """Whether the cell belongs to a stage before the grid; assumed if its result cannot be read."""
    record = read_object(cell.parents[1] / schema.RESULTS / f"{cell.name}.json").get("cell")
    return not isinstance(record, dict) or record.get("arm") is None


def _remove_empty_folders(cell: Path) -> None:
    for folder, _, _ in os.walk(cell, topdown=False):
        if Path(folder) != cell:
            with contextlib.suppress(OSError):  # it is not empty
                Path(folder).rmdir()
