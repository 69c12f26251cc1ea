"""A sweep as read from its directory: the plan, the runs, missing runs and problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from analysis.results.arm import Arm
from analysis.results.artifacts import GradientStudy, ValueStudy
from analysis.results.locked import LockedPlan
from analysis.results.plan import Plan
from analysis.results.records import Failure, Run

Artifact = TypeVar("Artifact", ValueStudy, GradientStudy)


@dataclass(frozen=True)
class Problem:
    """A problem with the files of a sweep.

    Attributes:
        text: One line that names the problem and the file.
        serious: Whether it rules out a verdict, because the design that the tests assume cannot be trusted.
        unread: Whether it is a file that could not be read, whose content is not known.
    """

    text: str
    serious: bool = False
    unread: bool = False


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as read from its directory.

    Attributes:
        directory: The sweep's directory.
        plan: The plan; inferred from the results if there is no locked one.
        locked: The locked plan, if there is one.
        runs: Results that passed all checks, in order of stage and plan.
        failures: Cells that ended without a result.
        problems: Files that were skipped, and other problems.
        seconds: Id of a cell -> wall time of its run, where it is known.
    """

    directory: Path
    plan: Plan
    locked: LockedPlan | None
    runs: tuple[Run, ...]
    failures: tuple[Failure, ...]
    problems: Sequence[Problem]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def grid(self) -> dict[tuple[str, int, int], Run]:
        """Runs of the grid by (arm, beta index, replicate)."""
        return {run.cell.place: run for run in self.runs if run.cell.place is not None}

    @property
    def arms(self) -> dict[str, Arm]:
        """Label -> properties of the arm, in the order of the plan."""
        known = self.locked.arms if self.locked else {}
        return {label: known.get(label, Arm()) for label in self.plan.grid.arms}

    @property
    def landmarks(self) -> list[Run]:
        """Runs of the shared stages without studies: the reference and the warm start."""
        return [run for run in self.runs if run.cell.arm is None and not (run.studies or run.other_studies)]

    @property
    def trials(self) -> list[Run]:
        """Runs of the tuning stage."""
        return [run for run in self.runs if run.cell.trial is not None]

    @property
    def rates(self) -> dict[str, float]:
        """Arm -> the rate chosen for it; empty without tuning, or before it is complete."""
        return self.locked.rates if self.locked else {}

    def studies(self, kind: type[Artifact]) -> list[tuple[Run, Artifact]]:
        """The artifacts of a kind of study, each with its run."""
        return [(run, one) for run in self.runs for one in run.studies if isinstance(one, kind)]

    def study(self, kind: type[Artifact]) -> tuple[Run, Artifact] | None:
        """The artifact of a kind of study with its run; the first one, if there are several."""
        return next(iter(self.studies(kind)), None)

    @property
    def missing(self) -> list[tuple[str, int, int]]:
        """Planned places with neither a result nor a recorded failure, which have still to be run."""
        known = set(self.grid) | {failure.cell.place for failure in self.failures}
        return [place for place in self.plan.places if place not in known]

    @property
    def invalid(self) -> list[str]:
        """The problems that rule out a verdict; empty if there are none."""
        return [problem.text for problem in self.problems if problem.serious]

    @property
    def warm_starts(self) -> int:
        """Number of different sets of checkpoints from which the runs of the grid started."""
        return len({run.cell.needs for run in self.grid.values()})
