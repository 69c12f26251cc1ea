"""Launchers, which start jobs and report how they ended. The coordinator decides what to run."""

from typing import Protocol

from analysis.sweep.job import Job


class Launcher(Protocol):
    """Runs jobs in parallel."""

    slots: int

    def submit(self, job: Job) -> None:
        """Start a job.

        Raises:
            OSError: If it cannot be started now.
        """

    def wait(self, seconds: float) -> list[tuple[str, int]]:
        """Wait at most `seconds` until a job has ended; return ids and exit codes of the cells that ended.

        A negative exit code is the signal that killed the job.
        """

    def ask_to_stop(self) -> None:
        """Ask the running cells to save a checkpoint and exit; `wait` returns them when they have."""

    def stop(self) -> None:
        """Kill the running jobs; cells without a published result are run again by the next sweep."""
