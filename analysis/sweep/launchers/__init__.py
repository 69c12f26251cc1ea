"""Launchers, which start jobs and report how they ended. The coordinator decides what to run.

Others can be added by the entry-point group `lit_klrb.launchers`: a name, and a function from `Options` to a
launcher.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple, Protocol

from analysis.sweep.job import Job
from lit_klrb.errors import ConfigurationError
from lit_klrb.extensions import extensions, load

GROUP = "lit_klrb.launchers"
OWN = {
    "local": "analysis.sweep.launchers.local:LocalLauncher.of",
    "ray": "analysis.sweep.launchers.ray:RayLauncher",
    "slurm": "analysis.sweep.launchers.slurm:SlurmLauncher",
}


class Exit(NamedTuple):
    """How a job ended."""

    cell_id: str
    code: int  # its exit code; a negative one is the signal that killed it
    reason: str = ""  # what the launcher knows beside, in one line


class Options(NamedTuple):
    """What launchers are made from."""

    workers: int | None  # number of cells that run at the same time; None for as many as fit
    threads: int  # threads of each process of a cell
    module: str  # the package whose `fit` command runs a cell
    directory: Path  # the sweep's directory
    processes: int = 1  # processes of a cell, at most
    gpus: int = 0  # GPUs of a cell, at most
    address: str | None = None  # where a cluster of Ray runs
    slurm: str = ""  # options of sbatch, as on its command line


class Launcher(Protocol):
    """Runs jobs in parallel.

    Attributes:
        slots: Number of cells that run at the same time.
        remote: Whether they may run on other machines.
        gpus: Number of GPUs that it gives to cells; None where a scheduler lets them wait.
    """

    slots: int
    remote: bool
    gpus: int | None

    def submit(self, job: Job) -> None:
        """Start a job.

        Raises:
            OSError: If it cannot be started now.
        """

    def wait(self, seconds: float) -> list[Exit]:
        """Wait at most `seconds` until a job has ended; return those that have."""

    def ask_to_stop(self) -> None:
        """Ask the running cells to save a checkpoint and exit; `wait` returns them when they have."""

    def stop(self) -> None:
        """Kill the running jobs; cells without a published result are run again by the next sweep."""


def launcher(name: str) -> Callable[[Options], Launcher]:
    """What makes the launcher of a name; one of another package cannot take the place of ours."""
    added = extensions(GROUP)
    if name not in OWN and name not in added:
        raise ConfigurationError(f"--launcher {name}: one of {', '.join(sorted({*OWN, *added}))} expected")
    made: Callable[[Options], Launcher] = (
        EntryPoint(name, OWN[name], GROUP).load() if name in OWN else load(added[name])
    )
    return made
