"""Where cells run: a launcher starts jobs and says how they ended. What to run is the coordinator's part."""

from typing import Protocol

from analysis.sweep.job import Job


class Launcher(Protocol):
    """Runs jobs side by side."""

    slots: int

    def submit(self, job: Job) -> None:
        """Start a job.

        Raises:
            OSError: If it cannot be started now.
        """

    def wait(self, seconds: float) -> list[tuple[str, int]]:
        """Wait until a job has ended, at most `seconds`; the cells that ended, each with its exit code.

        A negative exit code is the signal that killed the job.
        """

    def ask_to_stop(self) -> None:
        """Ask the cells that run to save a checkpoint and end; `wait` says when each has."""

    def stop(self) -> None:
        """Kill what still runs: a cell that did not publish is run again another time."""
