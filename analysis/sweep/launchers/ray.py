"""Runs cells as Ray tasks: on this machine, or on the nodes of a cluster that share the sweep's directory.

Ray only schedules cells: a task runs its cell once, and the coordinator decides whether it is run again, as
with every launcher.
"""

import time
from dataclasses import replace
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError

from analysis.sweep.job import FAILED, Job
from analysis.sweep.launchers.local import LocalLauncher

POLL_SECONDS = 3600.0


class RayLauncher:
    """Runs one Ray task per cell.

    Every Ray worker has a server with the libraries imported, from which its cells are forked.

    Args:
        workers: Number of cells that run at the same time; None for as many as the cluster has cores for.
        threads: Threads each cell computes with, and the CPUs it asks Ray for.
        address: "auto" or host:port of a running cluster; None starts one on this machine.
    """

    def __init__(self, workers: int | None, threads: int, address: str | None) -> None:
        own: dict[str, Any] = {"include_dashboard": False}
        if workers:
            own["num_cpus"] = workers * threads
        ray.init(
            address=address or "local", log_to_driver=False, logging_level="ERROR", **({} if address else own)
        )
        self._run = ray.remote(num_cpus=threads, max_retries=0)(_run)
        self._threads = threads
        self.slots = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        self._running: dict[Any, str] = {}

    def submit(self, job: Job) -> None:
        """Submit a job to Ray; it starts when a node has free CPUs."""
        elsewhere = replace(job, directory=job.directory.absolute())
        self._running[self._run.remote(elsewhere, self._threads)] = job.cell.id

    def wait(self, seconds: float) -> list[tuple[str, int]]:
        """Wait until a job has ended, at most `seconds`."""
        if not self._running:
            time.sleep(seconds)
            return []
        ended, _ = ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [(self._running.pop(task), _exit_code(task)) for task in ended]

    def ask_to_stop(self) -> None:
        """Kill the running cells, which Ray cannot signal; the next sweep resumes their checkpoints."""
        for task in self._running:
            ray.cancel(task, force=True)

    def stop(self) -> None:
        """Kill the running tasks and leave the cluster."""
        for task in self._running:
            ray.cancel(task, force=True)
        self._running.clear()
        ray.shutdown()


def _exit_code(task: Any) -> int:
    try:
        code: int = ray.get(task)
    except RayError:
        # The worker or its node has failed, and the cell with it
        return FAILED
    return code


@cache
def _forge(threads: int, module: str) -> LocalLauncher:
    return LocalLauncher(1, threads, module)


def _run(job: Job, threads: int) -> int:
    """Run a cell in a process forked from this worker's server."""
    launcher = _forge(threads, job.module)
    launcher.submit(job)
    ended: list[tuple[str, int]] = []
    while not ended:
        ended = launcher.wait(POLL_SECONDS)
    return ended[0][1]
