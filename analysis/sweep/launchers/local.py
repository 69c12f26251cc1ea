"""Cells as processes on this machine."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess

from analysis.sweep.job import Job, run_job

# The environment variable that tells `analysis.sweep.warm` whose server it is in, and what to import.
WARM = "LIT_KLRB_WARM"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait: a process that is left half started complains, and nobody would stop it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalLauncher:
    """Processes on this machine, forked from one server that has imported the stack.

    A cell gets a fresh process, so that none sees what another left behind, and still does not pay for the
    imports. This process never imports them: only the server does.

    Args:
        workers: Cells run at the same time.
        threads: Threads each computes with. Pinned in this process's environment, which the server inherits
            and where they must be set before the libraries are loaded.
        module: The package whose `fit` command runs a cell.
    """

    def __init__(self, workers: int, threads: int, module: str) -> None:
        self.slots = workers
        self._running: dict[str, ForkServerProcess] = {}
        for library in ("OMP", "MKL", "OPENBLAS"):
            os.environ[f"{library}_NUM_THREADS"] = str(threads)
        os.environ[WARM] = f"{os.getpid()} {module}.cli.lightning"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["analysis.sweep.warm"])

    def submit(self, job: Job) -> None:
        """Start a job; the first one waits for the imports."""
        process = self._context.Process(target=run_job, args=(job,))
        try:
            forkserver.ensure_running()
            with _undisturbed():
                process.start()
        except EOFError:
            raise ConnectionError("the server that cells are forked from was killed") from None
        self._running[job.cell.id] = process

    def wait(self, seconds: float) -> list[tuple[str, int]]:
        """Wait until a job has ended, at most `seconds`."""
        connection.wait([process.sentinel for process in self._running.values()], seconds)
        ended = [(cell_id, process.exitcode) for cell_id, process in self._running.items()]
        codes = [(cell_id, code) for cell_id, code in ended if code is not None]
        for cell_id, _ in codes:
            self._running.pop(cell_id).close()
        return codes

    def ask_to_stop(self) -> None:
        """Ask the cells that run to save a checkpoint and end."""
        for process in self._running.values():
            process.terminate()

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.join()
        self._running.clear()
