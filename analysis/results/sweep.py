"""A sweep as the analysis sees it: the plan, the runs and what is missing, and the matched pairs in it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """Where a run stands in the sweep; coordinates are None outside the estimator x beta x replicate grid."""

    id: str
    stage: str
    estimator: str | None
    beta: float | None
    level: int | None
    replicate: int | None
    seed: int | None
    needs: tuple[str, ...] = ()

    @property
    def point(self) -> tuple[str, int, int] | None:
        """(estimator, beta level, replicate) of a cell of the grid."""
        if self.estimator is None or self.level is None or self.replicate is None:
            return None
        return self.estimator, self.level, self.replicate

    def __str__(self) -> str:
        if self.point is None:
            return self.stage
        return f"{self.estimator}, β = {self.beta:g}, replicate {self.replicate}"


@dataclass(frozen=True, eq=False)
class Curve:
    """A metric logged during training: values [T] at steps [T], diverged values as `nan`."""

    step: FloatArray
    value: FloatArray


@dataclass(frozen=True, eq=False)
class Run:
    """One published result. Its outcome is `nan` if it diverged, whatever else the file says."""

    cell: Cell
    diverged: bool
    final: Mapping[str, float]
    curves: Mapping[str, Curve]
    versions: Mapping[str, str]
    checksum: str
    studies: Mapping[str, Any] = field(default_factory=dict)

    def outcome(self, key: str) -> float:
        """A final metric; `nan` if absent or if the run diverged."""
        return math.nan if self.diverged else self.final.get(key, math.nan)


@dataclass(frozen=True)
class Failure:
    """A cell lost to the machinery, not to training: its matched pair is dropped."""

    cell: Cell
    attempts: int
    error: str


@dataclass(frozen=True)
class Plan:
    """What was fixed before the sweep. Without a plan file it is inferred from the results.

    Attributes:
        name: What the sweep is called.
        setting: What was trained on what, in a sentence; may be empty.
        estimators: Names in plan order.
        betas: Level id -> KL weight.
        replicates: Matched runs at each beta.
        control: The estimator the others are compared with.
        alpha: Two-sided level.
        margins: Claim -> equivalence margin.
        cuts: KL cuts of the frontier share.
        corner: KL and reward that hypervolume is measured from, if they were fixed.
        sequential: Whether evidence is also weighed pair by pair, at any number of replicates.
        ids: Ids of the planned cells; empty if the plan does not list them.
        digest: The hash that locks the plan, or None if there is no plan file.
        history: Earlier versions of the plan, oldest first.
    """

    name: str
    estimators: tuple[str, ...]
    betas: Mapping[int, float]
    replicates: int
    control: str
    setting: str = ""
    alpha: float = 0.05
    margins: Mapping[str, float] = field(default_factory=dict)
    cuts: tuple[float, ...] = ()
    corner: tuple[float, float] | None = None
    sequential: bool = False
    ids: frozenset[str] = frozenset()
    digest: str | None = None
    history: tuple[Any, ...] = ()

    @property
    def points(self) -> list[tuple[str, int, int]]:
        """Every planned (estimator, beta level, replicate)."""
        return [(e, b, r) for e in self.estimators for b in self.betas for r in range(self.replicates)]


@dataclass(frozen=True, eq=False)
class Sweep:
    """A run directory as read.

    Attributes:
        directory: Where it lies.
        plan: The locked or inferred plan.
        runs: Results that passed every check, in order of stage and plan.
        failures: Cells lost to the machinery.
        problems: One line for each file that was left out, naming it and why.
    """

    directory: Path
    plan: Plan
    runs: tuple[Run, ...]
    failures: tuple[Failure, ...]
    problems: tuple[str, ...]

    @property
    def grid(self) -> dict[tuple[str, int, int], Run]:
        """Runs of the grid by (estimator, beta level, replicate)."""
        return {run.cell.point: run for run in self.runs if run.cell.point is not None}

    @property
    def landmarks(self) -> list[Run]:
        """Runs outside the grid that it starts from: the reference and the warm start."""
        return [run for run in self.runs if run.cell.point is None and not run.studies]

    def study(self, name: str) -> tuple[Run, Any] | None:
        """What a study of that name found, and the run it looked at; the first one, if there are several."""
        return next(((run, run.studies[name]) for run in self.runs if name in run.studies), None)

    @property
    def missing(self) -> list[tuple[str, int, int]]:
        """Planned points with neither a result nor a recorded failure: the sweep is not finished."""
        known = set(self.grid) | {failure.cell.point for failure in self.failures}
        return [point for point in self.plan.points if point not in known]

    @property
    def warm_starts(self) -> int:
        """Number of different sets of checkpoints the runs of the grid started from."""
        return len({run.cell.needs for run in self.grid.values()})
