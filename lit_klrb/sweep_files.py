"""The working files of a sweep's cells, most of which nobody needs once their results are published."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_klrb import schema

# Bytes above which those of the cells that were published first are removed.
LIMIT = 10_000_000_000


def trim(sweep: Path, limit: int) -> tuple[int, int]:
    """Remove checkpoints, metrics and other folders of published cells, oldest result first, until they fit.

    What lies in a cell's directory itself stays, such as its configuration and its log, and so does the
    newest checkpoint of a stage that other cells start from. Cells without a result, which the next sweep
    goes on with, and cells that are running keep everything. A result is never touched.

    Args:
        sweep: The directory of a sweep.
        limit: Bytes that may stay, over all published cells.

    Returns:
        How many files were removed, and their bytes.
    """
    files = {cell: dict(_removable(cell)) for cell in _published(sweep)}
    left = sum(sum(sizes.values()) for sizes in files.values())
    removed = 0, 0
    for cell, sizes in files.items():
        if left <= limit:
            break
        with _held(cell) as held:
            if not held:
                continue
            for path in sizes:
                path.unlink(missing_ok=True)
            _remove_empty_folders(cell)
        left -= sum(sizes.values())
        removed = removed[0] + len(sizes), removed[1] + sum(sizes.values())
    return removed


def _published(sweep: Path) -> list[Path]:
    """The working directories of the published cells, those with the oldest results first."""
    results = sorted((sweep / schema.RESULTS).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    cells = (sweep / schema.CELLS / path.stem for path in results)
    return [cell for cell in cells if cell.is_dir() and not cell.is_symlink()]


def _removable(cell: Path) -> Iterator[tuple[Path, int]]:
    """The files in a cell's folders, but a checkpoint that others may start from, with their sizes."""
    kept = cell / schema.CHECKPOINT if _is_shared(cell) else None
    for folder, _, names in os.walk(cell):  # links are not followed
        for path in (Path(folder, name) for name in names if Path(folder) != cell):
            if path != kept:
                with contextlib.suppress(OSError):  # another process has just removed it
                    yield path, path.lstat().st_size


def _is_shared(cell: Path) -> bool:
    """Whether the cell is of a stage before the grid; a result that cannot be read says nothing else."""
    try:
        record = json.loads((cell.parents[1] / schema.RESULTS / f"{cell.name}.json").read_bytes())["cell"]
        # Before there were arms, an estimator was one.
        return bool(record.get("arm", record.get("estimator")) is None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


@contextmanager
def _held(cell: Path) -> Iterator[bool]:
    """Hold a cell's directory as its worker does; whether nobody else had it."""
    descriptor = os.open(cell, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)


def _remove_empty_folders(cell: Path) -> None:
    for folder, _, _ in os.walk(cell, topdown=False):
        if Path(folder) != cell:
            with contextlib.suppress(OSError):  # it is not empty
                Path(folder).rmdir()
