"""A sweep as read from its directory: the plan, the runs, what is missing, and what is wrong with it."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Something in the directory that should not be.

    Attributes:
        text: What it is, in one line, and the file.
        serious: Whether no verdict may be given as long as it is there: the design that the tests rest on
            cannot be trusted.
    """

    text: str
    serious: bool = False


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as read from its directory.

    Attributes:
        directory: Where it is.
        plan: The plan; without a locked one it is inferred from the results.
        locked: The locked plan, if there is one.
        runs: Results that passed every check, in order of stage and plan.
        failures: Cells lost to the machinery.
        problems: What was left out, or is otherwise wrong.
    """

    directory: Path
    plan: Plan
    locked: LockedPlan | None
    runs: tuple[Run, ...]
    failures: tuple[Failure, ...]
    problems: Sequence[Problem]

    @property
    def grid(self) -> dict[tuple[str, int, int], Run]:
        """Runs of the grid by (arm, beta index, replicate)."""
        return {run.cell.place: run for run in self.runs if run.cell.place is not None}

    @property
    def arms(self) -> dict[str, Arm]:
        """Label -> what is known of the arm, in plan order."""
        known = self.locked.arms if self.locked else {}
        return {label: known.get(label, Arm()) for label in self.plan.grid.arms}

    @property
    def landmarks(self) -> list[Run]:
        """Runs outside the grid that it starts from: the reference and the warm start."""
        return [run for run in self.runs if run.cell.point is None and not run.studies]

    def study(self, kind: type[Artifact]) -> tuple[Run, Artifact] | None:
        """What a study of that kind found, and the run it looked at; the first one, if there are several."""
        found = ((run, one) for run in self.runs for one in run.studies if isinstance(one, kind))
        return next(found, None)

    @property
    def missing(self) -> list[tuple[str, int, int]]:
        """Planned places with neither a result nor a recorded failure: the sweep is not finished."""
        known = set(self.grid) | {failure.cell.place for failure in self.failures}
        return [place for place in self.plan.places if place not in known]

    @property
    def invalid(self) -> list[str]:
        """Why there can be no verdict, whatever the results say; empty if nothing stands against one."""
        return [problem.text for problem in self.problems if problem.serious]

    @property
    def warm_starts(self) -> int:
        """Number of different sets of checkpoints the runs of the grid started from."""
        return len({run.cell.needs for run in self.grid.values()})
