"""The directory of a running sweep: published results, and claims of cells.

There is no database. The file system guarantees one result per cell: `os.link` gives a name to a complete
file and fails if the name exists, so the first result is kept even if a cell runs twice. Claims only avoid
duplicate work and two writers in the same working directory: a worker holds a `flock` on the directory of its
cell, which the kernel releases when the worker exits, for whatever reason. No leases, clocks or stale owners
have to be handled. A `flock` is visible to the processes of one machine only; if several machines share a
directory, a single coordinator must distribute the cells.
"""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.results import layout
from analysis.results.store import encode_result, read_json, read_result
from lit_klrb import schema
from lit_klrb.errors import refusing
from lit_klrb.files import PARTIAL, claimed, read_object, write_atomically, write_once


def trim(sweep: Path, limit: float) -> tuple[int, int]:
    """Remove the folders of published cells (checkpoints, metrics, studies), oldest result first.

    Files at the top level of a cell's directory, such as its configuration and its log, are not removed, nor
    is the latest checkpoint of a stage from which other cells start. Cells without a result, which the next
    sweep resumes, running cells and results are not changed.

    Args:
        sweep: The sweep's directory.
        limit: Bytes that these folders may have in all.

    Returns:
        The number of cells whose folders were removed, and of their bytes.
    """
    results = sorted((sweep / schema.RESULTS).glob("*.json"), key=lambda path: path.lstat().st_mtime_ns)
    cells = sweep.resolve() / schema.CELLS
    # A name such as `...json` stands for a directory above; links are not followed
    named = [cells / path.stem for path in results if path.stem not in (".", "..")]
    files = {cell: dict(_removable(cell)) for cell in named if cell.is_dir() and cell.resolve() == cell}
    left = sum(sum(sizes.values()) for sizes in files.values())
    removed = []
    for cell, sizes in files.items():
        if left <= limit:
            break
        with claimed(cell) as free:
            if not free:
                continue
            for path in sizes:
                path.unlink(missing_ok=True)
            for folder, _, _ in os.walk(cell, topdown=False):
                if Path(folder) != cell:
                    with contextlib.suppress(OSError):  # it is not empty
                        Path(folder).rmdir()
        left -= sum(sizes.values())
        removed.append(sum(sizes.values()))
    removed = [size for size in removed if size]
    return len(removed), sum(removed)


def _removable(cell: Path) -> Iterator[tuple[Path, int]]:
    """The files in a cell's folders with their sizes, except a checkpoint from which others may start.

    That of a stage before the grid is one, and so is that of a cell whose result cannot be read.
    """
    record = read_object(cell.parents[1] / schema.RESULTS / f"{cell.name}.json").get("cell")
    shared = not isinstance(record, dict) or record.get("arm") is None
    for folder, _, names in os.walk(cell):  # links are not followed
        for path in (Path(folder, name) for name in names if Path(folder) != cell):
            if not (shared and path == cell / schema.CHECKPOINT):
                with contextlib.suppress(OSError):  # another process may remove it
                    yield path, path.lstat().st_size


# The name of the file by which a machine recognises the directory.
TOKEN = ".shared"


class Store:
    """Reads and writes the directory of a sweep.

    Args:
        directory: The sweep's directory; created by the first write.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.results = directory / layout.RESULTS

    def token(self, *, create: bool = False) -> str:
        """The content of a file by which a machine recognises the directory; "" without one.

        Args:
            create: Write it if there is none, which shows whether results can be published.

        Raises:
            ConfigurationError: If the file system has no hard links.
        """
        path = self.directory / TOKEN
        if create and not path.exists():
            why = f"{self.directory} has no hard links, with which results are published"
            with refusing(why, OSError, key="directory"):
                write_once(path, secrets.token_hex(16).encode())
        return path.read_text() if path.exists() else ""

    def workdir(self, cell_id: str) -> Path:
        """The working directory of a cell."""
        return layout.workdir(self.directory, cell_id)

    def is_settled(self, cell_id: str, needs_checkpoint: bool) -> bool:
        """Whether a cell need not run any more.

        Args:
            cell_id: The cell.
            needs_checkpoint: Whether another cell that has still to run needs its checkpoint. A published
                cell whose checkpoint was deleted is then run again, and its result compared.
        """
        # That of a run that ended, rather than of one that was stopped
        ended = [self.workdir(cell_id) / name for name in (schema.CHECKPOINT, schema.SUMMARY)]
        if not needs_checkpoint or all(path.exists() for path in ended):
            return self._result(cell_id).exists()
        result = self.result(cell_id)
        return result is not None and result["state"] == schema.DIVERGED

    def result(self, cell_id: str) -> dict[str, Any] | None:
        """Read and check the published result of a cell; None if it has none.

        Raises:
            DamagedFileError: If the file was changed.
        """
        path = self._result(cell_id)
        return read_result(path) if path.exists() else None

    def publish(self, result: dict[str, Any]) -> bool:
        """Publish the result of a cell unless it has one; a second, different one is stored under refused/.

        Returns:
            Whether the published result equals this one. False means that the same cell gave two results:
            something it depends on is missing from its id, or its computation is not deterministic.
        """
        path = self._result(result["id"])
        content = encode_result(result)
        if write_once(path, content) or path.read_bytes() == content:
            self._failure(result["id"]).unlink(missing_ok=True)
            return True
        write_atomically(layout.result_path(self.directory, result["id"], layout.REFUSED), content)
        return False

    def failure(self, cell_id: str) -> dict[str, Any] | None:
        """The record of a cell that ended without a result; None if there is none."""
        path = self._failure(cell_id)
        if self._result(cell_id).exists() or not path.exists():
            return None
        content: dict[str, Any] = read_json(path)
        return content

    def record_failure(self, cell_id: str, cell: dict[str, Any], error: str) -> None:
        """Record that an attempt at a cell ended without a result."""
        attempts = 1 + (self.failure(cell_id) or {"attempts": 0})["attempts"]
        record = {"id": cell_id, "cell": cell, "attempts": attempts, "error": error}
        write_atomically(self._failure(cell_id), json.dumps(record, indent=1).encode())

    @contextmanager
    def claim(self, cell_id: str) -> Iterator[bool]:
        """Claim the cell for this process if it is free; released at the end of the block or the process.

        Yields:
            Whether the cell was claimed.
        """
        self.workdir(cell_id).mkdir(parents=True, exist_ok=True)
        # A cell is emptied before it runs: not through a link
        with claimed(self.workdir(cell_id)) as free:
            yield free

    def is_claimed(self, cell_id: str) -> bool:
        """Whether a process has claimed the cell."""
        with self.claim(cell_id) as free:
            return not free

    def saved(self, cell_id: str) -> int:
        """When the checkpoint of a cell was written, in nanoseconds; 0 without one."""
        path = self.workdir(cell_id) / schema.CHECKPOINT
        return path.stat().st_mtime_ns if path.exists() else 0

    def clear(self, cell_id: str) -> None:
        """Empty the working directory of a claimed cell."""
        # The claim is on the directory itself, which must not be replaced
        for path in self.workdir(cell_id).iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def log(self, cell_id: str) -> Path:
        """The log file of the cell's latest attempt."""
        return self.workdir(cell_id) / layout.LOG

    def log_tail(self, cell_id: str) -> str:
        """The last ten lines of the log of the cell's latest attempt."""
        path = self.log(cell_id)
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(text.rstrip().splitlines()[-10:])

    def seconds(self, cell_id: str) -> Path:
        """The file with the time of the cell, unless it was resumed; not part of its reproducible result."""
        return self.workdir(cell_id) / layout.SECONDS

    def link(self, name: str, cell_id: str) -> None:
        """Link DIRECTORY/name to the run directory of a cell, unless something else has that name."""
        target = self.directory / name
        if target.exists() and not target.is_symlink():
            return
        partial = self.directory / f".{name}.{secrets.token_hex(8)}"
        partial.symlink_to(self.workdir(cell_id).relative_to(self.directory), target_is_directory=True)
        partial.replace(target)

    def tidy(self) -> None:
        """Remove leftovers of killed processes: temporary files, and failures of cells that have a result."""
        for record in layout.result_paths(self.directory, layout.FAILED):
            if self._result(record.stem).exists():
                record.unlink(missing_ok=True)
        for path in self.results.glob(f".*{PARTIAL}"):
            with self.claim(path.name[1:65]) as free:
                if free:
                    path.unlink(missing_ok=True)

    def _result(self, cell_id: str) -> Path:
        return layout.result_path(self.directory, cell_id)

    def _failure(self, cell_id: str) -> Path:
        return layout.result_path(self.directory, cell_id, layout.FAILED)
