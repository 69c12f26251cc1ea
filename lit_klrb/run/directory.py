"""The run directory, which belongs to one run; a new run never overwrites an earlier one."""

import json
import os
import re
import secrets
import shlex
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path, read_object, remove_unfinished, try_lock, write_output

KEY = "trainer.default_root_dir"
LOCK = ".lock"


class RunDirectory:
    """The directory of a run, locked by one process at a time.

    A directory belongs to a run if it has the file `run.json` with the run's id. A new run renames the
    directory of an earlier one. A resumed run continues in its own directory, or in a new one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_id = ""
        self._lock: int | None = None
        # To undo a failed start: the new paths, and the new name of the earlier run's directory
        self._new: list[Path] = []
        self._kept: Path | None = None

    def __enter__(self) -> Self:
        """Does nothing; `begin` locks and creates the directory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def checkpoint(self) -> Path:
        """The path of the latest checkpoint."""
        return self.path / schema.CHECKPOINT

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        config, checkpoint = (shlex.quote(str(path)) for path in (self.path / schema.CONFIG, self.checkpoint))
        return f"lit-klrb fit --config {config} --ckpt_path {checkpoint}"

    @property
    def export_command(self) -> str:
        """The command that writes the trained model as a folder for other software."""
        checkpoint, folder = (shlex.quote(str(path)) for path in (self.checkpoint, self.path / "model"))
        return f"lit-klrb export --ckpt_path {checkpoint} --output_dir {folder}"

    def begin(self, resumed: str | None = None) -> None:
        """Lock the directory, and rename an earlier run's directory for a new run.

        Args:
            resumed: The id of the run to resume; None for a new run.
        """
        with refusing(f"{self.path} is a link to itself", OSError, RuntimeError, key=KEY):
            root = self.path.resolve()
        # A sweep empties the directory of a published cell before it runs the cell again
        if published_result(root) is not None and any((root / name).exists() for name in schema.OWN):
            problem = f"{root} is a published cell of the sweep in {root.parent.parent}; name another one"
            raise ConfigurationError(problem, key=KEY)
        self._take(root)
        previous = run_id(root)
        if previous is not None and resumed is None:
            remove_unfinished(root, schema.OWN)
            if {path.name for path in root.iterdir()} <= {schema.RUN, LOCK}:
                (root / schema.RUN).unlink()  # of a run that was killed before it wrote anything
            else:
                self._set_aside(root)
            previous = None
        if previous is None:
            if taken := [name for name in schema.OWN if (root / name).exists()]:
                problem = f"has {', '.join(taken)} but does not belong to a run (no {schema.RUN})"
                raise ConfigurationError(f"{root} {problem}; name another one", key=KEY)
            self._new = self._new or [root / name for name in (*schema.OWN, LOCK)]
            self.run_id = resumed or secrets.token_hex(8)
            write_output(root / schema.RUN, json.dumps({"run": self.run_id}) + "\n")
        elif previous == resumed:
            self.run_id = previous
            remove_unfinished(root, schema.OWN)
        else:
            problem = f"{self.path} belongs to another run than ckpt_path"
            raise ConfigurationError(f"{problem}; resume it in its own directory, or in a new one", key=KEY)

    def abandon(self) -> None:
        """Undo `begin`, for a run that failed before its first step."""
        for path in self._new:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self._kept is not None:
            self._kept.rename(self.path.resolve())
            print(f"the earlier run is back in {self.path}")
        self._new, self._kept = [], None

    def _take(self, root: Path) -> None:
        """Create the directory if necessary, and lock it until `__exit__` or the end of the process."""
        problem = f"another run is writing to {self.path}; wait for its end, or name another directory"
        busy = ConfigurationError(problem, key=KEY)
        with refusing(f"cannot write to {self.path}", OSError, key=KEY):
            if not root.exists():
                root.mkdir(parents=True)
                self._new = [root]
            # A link would make the file that it points to
            lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            free = try_lock(lock)
        except OSError:
            free = True  # a file system without locks
        if not free:
            os.close(lock)
            raise busy
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock
        # Another process may have renamed the directory between opening and locking the file
        if not (root / LOCK).exists() or not os.path.samestat(os.fstat(lock), os.stat(root / LOCK)):
            raise busy

    def _set_aside(self, root: Path) -> None:
        """Rename the directory of an earlier run, and create a new one."""
        if Path.cwd().resolve().is_relative_to(root):
            problem = f"{self.path} contains a run and is the current directory"
            remedy = "start a new run from another directory, or resume this one with --ckpt_path"
            raise ConfigurationError(f"{problem}; {remedy}", key=KEY)
        number = 1
        while (kept := root.with_name(f"{root.name}.{number}")).exists():
            number += 1
        root.rename(kept)
        self._kept = kept
        print(f"kept the earlier run as {kept if self.path.is_absolute() else os.path.relpath(kept)}")
        self._take(root)


def check_named(path: str | None) -> None:
    """Check that a run directory is named; an empty path would be the current directory."""
    if path is None or not str(path).strip():
        shown = "null" if path is None else repr(str(path))
        raise ConfigurationError(f"must name a directory, such as runs/mine, got {shown}", key=KEY)
    local_path(str(path), KEY)


def run_id(root: Path) -> str | None:
    """The id of the run to which a directory belongs; None if there is none."""
    run = read_object(root / schema.RUN).get("run")
    return run if isinstance(run, str) else None


def published_result(root: Path) -> Path | None:
    """The published result of the cell of a sweep; None if the directory is not that of a published cell."""
    result = root.parent.parent / schema.RESULTS / f"{root.name}.json"
    return result if root.parent.name == schema.CELLS and result.exists() else None


def next_attempt(root: Path) -> int:
    """The number of the next attempt at this run."""
    names = (path.name.removeprefix("attempt_") for path in (root / schema.METRICS_DIR).glob("attempt_*"))
    return 1 + max((int(name) for name in names if re.fullmatch(r"\d+", name)), default=-1)
