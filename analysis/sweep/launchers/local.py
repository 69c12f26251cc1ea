"""Runs cells as processes on this machine."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from typing import Self

from analysis.design.resources import VISIBLE, visible_gpus
from analysis.sweep.job import LIBRARIES, Job, misplaced_exit, run_job
from analysis.sweep.launchers import Exit, Options
from lit_klrb.errors import ConfigurationError

# Seconds between looks at a cell of another machine.
POLL_SECONDS = 3600.0
# The environment variable that tells `analysis.sweep.warm` its coordinator and what to import.
WARM = "LIT_KLRB_WARM"


def places(cores: int, gpus: int = 0) -> int:
    """Number of cells that this machine has cores for, or GPUs where each cell gets some."""
    if gpus and (there := visible_gpus()):
        return max(1, len(there) // gpus)
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, every // cores)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Block signals, as a process interrupted while it starts prints errors and would not be stopped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalLauncher:
    """Runs cells as processes forked from a server that has imported the libraries.

    Every cell has a new process, so cells do not affect each other, without the time of the imports. Only the
    server imports the libraries, not this process. A cell sees the GPUs that it gets, and no others.

    Args:
        workers: Number of cells that run at the same time.
        threads: Threads per cell, unless its stage has others. Set in this process's environment, which the
            server inherits, as it must be set before the libraries are loaded.
        module: The package whose `fit` command runs a cell.
    """

    remote = False

    def __init__(self, workers: int, threads: int, module: str) -> None:
        self.slots, self.gpus = workers, len(visible_gpus())
        self._running: dict[str, ForkServerProcess] = {}
        self._taken: dict[str, list[str]] = {}
        for library in LIBRARIES:
            os.environ[f"{library}_NUM_THREADS"] = str(threads)
        os.environ[WARM] = f"{os.getpid()} {module}.cli.lightning"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["analysis.sweep.warm"])

    @classmethod
    def of(cls, options: Options) -> Self:
        """The launcher of a sweep; as many cells at the same time as there are cores or GPUs for, by default.

        Raises:
            ConfigurationError: If this machine has fewer GPUs than a cell gets.
        """
        if options.gpus > (there := len(visible_gpus())):
            text = f"a cell gets {options.gpus}, and this machine has {there}; {VISIBLE} can name others"
            raise ConfigurationError(text, key="gpus")
        workers = options.workers or places(options.threads * options.processes, options.gpus)
        return cls(workers, options.threads, options.module)

    def start(self) -> None:
        """Start the server, which imports the libraries meanwhile; otherwise `submit` does."""
        forkserver.ensure_running()

    def submit(self, job: Job) -> None:
        """Start a job; the first one waits for the imports."""
        # Also in a process of Ray, to which each task shows other GPUs than the server was started with
        there, taken = visible_gpus(), {gpu for gpus in self._taken.values() for gpu in gpus}
        gpus = [gpu for gpu in there if gpu not in taken][: job.gpus]
        visible = ",".join(gpus) if there or VISIBLE in os.environ else None
        process = self._context.Process(target=run_job, args=(replace(job, visible=visible),))
        try:
            self.start()
            with _undisturbed():
                process.start()
        except EOFError:
            raise ConnectionError("the server that cells are forked from was killed") from None
        self._running[job.cell.id], self._taken[job.cell.id] = process, gpus

    def wait(self, seconds: float) -> list[Exit]:
        """Wait until a job has ended, at most `seconds`."""
        connection.wait([process.sentinel for process in self._running.values()], seconds)
        ended = [(cell_id, process.exitcode) for cell_id, process in self._running.items()]
        exits = [Exit(cell_id, code) for cell_id, code in ended if code is not None]
        for exit in exits:
            self._running.pop(exit.cell_id).close()
            del self._taken[exit.cell_id]
        return exits

    def ask_to_stop(self) -> None:
        """Ask the running cells to save a checkpoint and exit."""
        for process in self._running.values():
            process.terminate()

    def stop(self) -> None:
        """Kill the running cells."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.join()
        self._running.clear()
        self._taken.clear()


# One for all cells that this process runs
_forge = cache(LocalLauncher)


def run_forked(job: Job) -> tuple[int, str]:
    """Run a cell in a process forked from this process's server; return its exit code and why, if known."""
    if (ended := misplaced_exit(job)) is not None:
        return ended
    launcher = _forge(1, job.threads, job.module)
    launcher.submit(job)
    while not (exits := launcher.wait(POLL_SECONDS)):
        pass
    return exits[0].code, exits[0].reason
