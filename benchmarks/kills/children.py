"""Forked children that run a command, and how they are killed."""

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lit_klrb.run import checkpoints

BEGIN, RENAMED, END = b"<", b"=", b">"


class Child:
    """A command in a forked process with a new session, which is killed at the end of the block.

    Args:
        command: `main` of a command line: arguments in, exit code out.
        argv: Its arguments.
        log: Where its output goes, behind what is there.
        environment: Variables it has beside those of this process.
    """

    def __init__(
        self,
        command: Callable[[Sequence[str]], int],
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.log = log
        self.code: int | None = None
        self.began = time.monotonic()
        # The child reports the start, the rename and the end of each save.
        self._told, tell = os.pipe()
        self.heard = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._told)
            _run(command, argv, log, environment, tell)
        os.close(tell)
        os.set_blocking(self._told, False)

    def wait(self, seconds: float = 600.0) -> int | None:
        """Wait at most `seconds` for its end; return the exit code, negative for a signal, or None."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif (left := deadline - time.monotonic()) <= 0:
                break
            else:
                time.sleep(min(left, 0.002))
        return self.code

    def wait_for_save(self, count: int) -> bool:
        """Wait for the start of the n-th save; False if the command ended before."""
        while self._listen().count(BEGIN) < count:
            if self.wait(0) is not None:
                return False
            select.select([self._told], [], [], 0.1)
        return True

    def kill(self, alone: bool = False) -> int:
        """Kill it and its children with SIGKILL; return the exit code, which tells whether it had ended.

        Args:
            alone: Only to itself.
        """
        if self.wait(0) is None:
            try:
                (os.kill if alone else os.killpg)(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no session yet
                os.kill(self.pid, signal.SIGKILL)
        code = self.wait()
        assert code is not None
        self._listen()
        return code

    @property
    def last_line(self) -> str:
        """The last line of its output."""
        return (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill all its processes."""
        self.kill()
        os.close(self._told)

    def _listen(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            while news := os.read(self._told, 4096):
                self.heard += news
        return self.heard


def session(leader: int) -> list[int]:
    """The processes in the session of `leader`, but those that have ended and are not waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _run(
    command: Callable[[Sequence[str]], int],
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    tell: int,
) -> None:
    """The code of the child, which never returns."""
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        os.environ.update(environment)
        tempfile.tempdir = None
        _tell_of_saves(tell)
        code = command(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _tell_of_saves(tell: int) -> None:
    save, sync = checkpoints.CheckpointFiles.save_checkpoint, checkpoints.sync

    def told_save(*arguments: Any, **keywords: Any) -> None:
        os.write(tell, BEGIN)
        save(*arguments, **keywords)
        os.write(tell, END)

    def told_sync(folder: Path) -> None:
        os.write(tell, RENAMED)
        sync(folder)

    checkpoints.CheckpointFiles.save_checkpoint = told_save  # type: ignore[method-assign]
    checkpoints.sync = told_sync
