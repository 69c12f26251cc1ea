"""A sweep, read once from its directory into a value: the plan, the runs, what is missing, and the problems.

Failed checks of a file are reported as problems.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from analysis.results import layout
from analysis.results.artifacts import GradientStudy, ValueStudy
from analysis.results.consistency import Problem as Problem, counted, inconsistencies, lost_runs
from analysis.results.locked import LockedPlan
from analysis.results.plan import Grid, Plan, Primary, Stage, Trial
from analysis.results.rate_choice import choice_problems
from analysis.results.records import Arm, Cell, Failure, Run, decode_run, read_failure, read_run
from analysis.results.store import (
    DamagedFileError,
    archive_lines,
    archive_path,
    has_archive,
    present,
    read_seconds,
    reason,
)
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

Artifact = TypeVar("Artifact", ValueStudy, GradientStudy)
Record = TypeVar("Record", Run, Failure)
# Number of last values of a curve in a log that are not numbers if its run diverged.
_LAST_VALUES = 3


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as read from its directory.

    Attributes:
        directory: The sweep's directory.
        plan: The plan; inferred from the results if there is no locked one.
        locked: The locked plan, if there is one.
        runs: Results that passed all checks, in order of stage and plan.
        failures: Cells that ended without a result.
        problems: Files that were skipped, and other problems; those of one kind are one, with their number.
        seconds: Id of a cell -> wall time of its run, where it is known.
        lost: Places without a run in an import whose mapping says to leave such replicates out.
        left_out: The runs of those replicates at the same beta, which `runs` lacks.
    """

    directory: Path
    plan: Plan
    locked: LockedPlan | None
    runs: tuple[Run, ...]
    failures: tuple[Failure, ...]
    problems: Sequence[Problem]
    seconds: Mapping[str, float] = field(default_factory=dict)
    lost: Sequence[tuple[str, int, int]] = ()
    left_out: tuple[Run, ...] = ()

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
        known = set(self.grid) | {failure.cell.place for failure in self.failures} | set(self.lost)
        known |= {run.cell.place for run in self.left_out}
        return [place for place in self.plan.places if place not in known]

    @property
    def invalid(self) -> list[str]:
        """The problems that rule out a verdict; empty if there are none."""
        return [problem.text for problem in self.problems if problem.serious]

    @property
    def warm_starts(self) -> int:
        """Number of different sets of checkpoints from which the runs of the grid started."""
        return len({run.cell.needs for run in self.grid.values()})


def load_sweep(directory: Path) -> Sweep:
    """Read a sweep. Files that fail a check are skipped and listed in `problems`.

    Args:
        directory: The sweep's directory, with a `results` folder or an archive of it.

    Raises:
        ConfigurationError: If it has no results, or both.
        DamagedFileError: If its plan cannot be read.
    """
    problems: list[Problem] = []
    runs: Sequence[Run] = (_read_archive if has_archive(directory) else _read_results)(directory, problems)
    failures: Sequence[Failure] = _read_failures(directory, problems)
    known = {run.cell.id for run in runs}
    locked: LockedPlan | None = None
    if os.path.lexists(path := present(directory / layout.PLAN)):
        locked = LockedPlan.read(path)
        plan = locked.plan
        known |= set(locked.cells)
        problems += _plan_problems(locked)
        runs = _planned(runs, locked, layout.RESULTS, problems)
        failures = _planned(failures, locked, layout.FAILED, problems)
    else:
        try:
            plan = _inferred_plan(directory, [run.cell for run in runs])
        except ValueError as error:
            raise DamagedFileError(f"{directory}: its results are of no plan ({reason(error)})") from None
        runs = _without_duplicates(runs, problems)
    origin = locked.origin if locked else None
    runs = _matched(_judged(runs, plan, problems, imported=origin is not None), plan, problems)
    units_unknown = origin is not None and origin.kl_unit is None
    problems += inconsistencies(runs, plan, imported=origin is not None, units_unknown=units_unknown)
    published = {run.cell.id for run in runs}
    problems += choice_problems(plan, runs, locked.choice if locked else None)
    failures = [failure for failure in failures if failure.cell.id not in published]
    problems += lost_runs(failures, plan)
    seconds = _times(directory, published, known, problems)
    order = {place: i for i, place in enumerate(plan.places)}
    runs = sorted(runs, key=lambda run: (order.get(run.cell.place or ("", 0, 0), -1), run.cell.id))
    found = Sweep(directory, plan, locked, tuple(runs), tuple(failures), problems, seconds)
    if origin is not None:
        found = _without_incomplete(found, leave_out=origin.incomplete == "leave_out_replicate")
    return replace(found, problems=counted(found.problems))


def _without_incomplete(sweep: Sweep, *, leave_out: bool) -> Sweep:
    """An import with a problem for each missing run, and without its replicate if the mapping says so."""
    missing = sweep.missing
    if not missing:
        return sweep
    lost = {place[1:] for place in missing}
    names = "; ".join(
        f"{arm}, β = {sweep.plan.grid.beta[index]:g}, replicate {r}" for arm, index, r in missing
    )
    done = "left out at this beta in all arms" if leave_out else "no verdict"
    text = f"{len(missing)} of {len(sweep.plan.places)} runs are missing, whose replicate is {done}: {names}"
    if not leave_out:
        text = f"{len(missing)} of {len(sweep.plan.places)} runs are missing: {names}"
    problems = [*sweep.problems, Problem(text)]
    if not leave_out:
        return replace(sweep, problems=problems)
    out = [run for run in sweep.runs if run.cell.place is not None and run.cell.place[1:] in lost]
    kept = tuple(run for run in sweep.runs if run not in out)
    return replace(sweep, problems=problems, runs=kept, lost=missing, left_out=tuple(out))


def _judged(runs: Sequence[Run], plan: Plan, problems: list[Problem], *, imported: bool) -> list[Run]:
    """The runs, diverged if they lack an outcome that the plan compares, and a problem for each left out.

    In a log of other software a value that is not a number may be a gap: such a run is left out, unless its
    last values are none.
    """
    compared = (schema.KL,) if plan.primary.outcome == schema.KL else (schema.REWARD, schema.KL)
    kept = []
    for run in runs:
        lacks = run.cell.arm is not None and any(key not in run.final for key in compared)
        if imported and (lacks or run.diverged) and not _ends_in_nan(run, compared):
            text = f"{run.file}: {run.cell.title}: the log ends without a number"
            why = f"a run has diverged if its last {_LAST_VALUES} rows have none"
            problems.append(Problem(f"{text}; {why}", serious=True, kind="ends without a number"))
        else:
            kept.append(replace(run, diverged=True) if lacks else run)
    return kept


def _ends_in_nan(run: Run, metrics: Sequence[str]) -> bool:
    """Whether the last values of the curve of a metric are not numbers."""
    curves = [run.curves[key] for name in metrics if (key := f"train/{name}") in run.curves]
    ends = [curve.value[-_LAST_VALUES:] for curve in curves]
    return any(len(end) == _LAST_VALUES and not np.isfinite(end).any() for end in ends)


def _read_results(directory: Path, problems: list[Problem]) -> list[Run]:
    paths = layout.result_paths(directory)
    if not paths:
        raise ConfigurationError(f"{directory}: no results/*.json; the directory of a sweep is expected")
    return [*_read_all(((path, read_run) for path in paths), problems)]


def _read_failures(directory: Path, problems: list[Problem]) -> list[Failure]:
    return [*_read_all(((path, read_failure) for path in layout.failure_paths(directory)), problems)]


def _read_archive(directory: Path, problems: list[Problem]) -> list[Run]:
    """The runs of an archive; a second line with the same cell, which no sweep writes, is a problem."""

    def decoding(raw: bytes) -> Callable[[Path], Run]:
        return lambda line: decode_run(line, raw)

    found: dict[str, Run] = {}
    for run in _read_all(((line, decoding(raw)) for line, raw in archive_lines(directory)), problems):
        if run.cell.id in found:
            text = f"{layout.ARCHIVE}: has two results of the cell {run.cell.id}"
            problems.append(Problem(text, serious=True, kind="two results of a cell"))
        found.setdefault(run.cell.id, run)
    if not found and not problems:
        raise ConfigurationError(f"{archive_path(directory)}: has no results")
    return list(found.values())


def _times(
    directory: Path, published: set[str], known: set[str], problems: list[Problem]
) -> Mapping[str, float]:
    try:
        seconds, texts = read_seconds(directory, published, known)
    except (DamagedFileError, OSError) as error:
        path = str(directory / layout.TIMES)
        text = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        problems.append(Problem(text.replace(path, layout.TIMES, 1), unread=True))
        return {}
    problems += map(Problem, texts)
    return seconds


def _read_all(
    places: Iterable[tuple[Path, Callable[[Path], Record]]], problems: list[Problem]
) -> Iterator[Record]:
    for path, read in places:
        name = f"{path.parent.name}/{path.name}"
        try:
            yield read(path)
        except DamagedFileError as error:
            # The message starts with the path; within the directory the end of it is enough.
            problems.append(Problem(str(error).replace(str(path), name, 1), unread=True))
        except OSError as error:
            problems.append(Problem(f"{name}: {error.strerror}", unread=True))


def _plan_problems(locked: LockedPlan) -> list[Problem]:
    """Problems of the locked plan: its hash, cells that do not match its grid, imports, evaluations."""
    found, plan = [], locked.plan
    if not locked.recomputed:
        found.append(
            f"{layout.PLAN}: does not have the hash {locked.hash[:12]} that it is locked with; it was edited "
            "after it was locked"
        )
    grid = [cell.point for cell in locked.cells.values() if cell.point is not None]
    trials = [cell.trial for cell in locked.cells.values() if cell.trial is not None]
    if sorted(point.place for point in grid) != sorted(plan.places) or sorted(trials) != sorted(plan.trials):
        found.append(f"{layout.PLAN}: its cells are not those of its grid")
    else:
        alien = [point for point in grid if point.beta != plan.grid.beta[point.beta_index]]
        found += [f"{layout.PLAN}: a cell has beta {point.beta:g}, not its grid's" for point in alien[:1]]
        found += [f"{layout.PLAN}: {cell} is not of its block" for cell in _of_other_blocks(locked)][:1]
    problems = [Problem(text, serious=True) for text in found]
    if (origin := locked.origin) is not None:
        text = f"the runs were imported from {origin.source}: they were not scored by the common evaluator"
        problems.append(Problem(f"{text}; reward and KL are what the software that trained them logged"))
        if origin.repeated_rows:
            problems.append(
                Problem(f"{origin.repeated_rows} rows stood twice in what was imported and count once")
            )
    problems += [
        Problem(
            f"{label} was evaluated with {key} = {own}, {plan.primary.control} with {control}", serious=True
        )
        for label, arm in locked.arms.items()
        for key, (own, control) in arm.evaluation.items()
    ]
    return problems


def _of_other_blocks(locked: LockedPlan) -> Iterator[Cell]:
    """Cells that differ from their block in the plan, whose order the hash does not cover."""
    plan, ids = locked.plan, {cell.stage: cell.id for cell in locked.cells.values() if cell.arm is None}
    for cell in locked.cells.values() if plan.grid.blocks else ():
        place = cell.point or cell.trial
        if place is None:
            continue
        needs = {ids.get(stage) for stage in plan.inputs(place.replicate).values()}
        if {*cell.needs} != needs or not plan.overrides(place).items() <= cell.overrides.items():
            yield cell


def _planned(
    records: Sequence[Record], locked: LockedPlan, folder: str, problems: list[Problem]
) -> list[Record]:
    """The runs or failures that match the plan, with its cells, and a problem for each other one."""
    kept = []
    for record in records:
        found = _difference(record.cell, locked)
        if found is None:
            kept.append(replace(record, cell=locked.cells[record.cell.id]))
        else:
            text = f"{folder}/{record.cell.id}.json: {found}"
            kind = f"{folder}: {found.partition(' is ')[0]}"
            problems.append(Problem(text, serious=folder == layout.RESULTS, kind=kind))
    return kept


def _difference(cell: Cell, locked: LockedPlan) -> str | None:
    """Why a record does not match the plan; None if it does."""
    planned = locked.cells.get(cell.id)
    if planned is None:
        return "its id is not in the plan"
    ours, theirs = cell.record(), planned.record()
    for key, value in ours.items():
        if key != "arm" and value != theirs[key]:  # an arm may have been renamed
            return f"its {key} is {value!r}, the plan has {theirs[key]!r}"
    return None


def _matched(runs: Sequence[Run], plan: Plan, problems: list[Problem]) -> list[Run]:
    """The runs with the plan's beta and the same seed as their pair, and a problem for each other one."""
    seeds: dict[tuple[int, int], set[int]] = defaultdict(set)
    for run in runs:
        if run.cell.point is not None:
            seeds[run.point.beta_index, run.point.replicate].add(run.cell.seed)

    def why(run: Run) -> str | None:
        point = run.cell.point
        if point is None:
            return None
        index, replicate, beta = point.beta_index, point.replicate, plan.grid.beta.get(point.beta_index)
        if len(own := sorted(seeds[index, replicate])) > 1:
            return f"the runs of beta index {index}, replicate {replicate} have different seeds: {own}"
        if not 0 <= replicate < plan.grid.replicates:
            return f"there is no replicate {replicate}"
        return None if beta == point.beta else f"its beta is {point.beta:g}, expected {beta}"

    kept = []
    for run in runs:
        if (text := why(run)) is None:
            kept.append(run)
        else:
            problems.append(Problem(f"{run.file}: {text}", serious=True, kind=text))
    return kept


def _inferred_plan(directory: Path, cells: Sequence[Cell]) -> Plan:
    """The smallest plan that has all cells of a grid."""
    arms = {cell.point.arm: cell.overrides for cell in cells if cell.point is not None}
    points = [cell.point for cell in cells if cell.point is not None]
    labels = sorted(arms)
    # If an index has several betas, the most frequent one; the others are reported as problems
    weights: dict[int, Counter[float]] = defaultdict(Counter)
    for point in points:
        weights[point.beta_index][point.beta] += 1
    betas = {index: weights[index].most_common(1)[0][0] for index in sorted(weights)}
    # The number of runs bounds the number of replicates, against absurd values in a file
    replicates = min(1 + max((point.replicate for point in points), default=-1), len(points))
    return Plan(
        name="sweep without a plan",
        directory=str(directory),
        stages={cell.stage: Stage("") for cell in cells},
        grid=Grid({label: arms[label] for label in labels}, betas, replicates),
        primary=Primary("MonteCarlo" if "MonteCarlo" in labels else next(iter(labels), "")),
    )


def _without_duplicates(runs: Sequence[Run], problems: list[Problem]) -> list[Run]:
    """The runs that are alone in their place. Choosing among several would be a selection."""
    groups: dict[tuple[str, int, int] | Trial | str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.cell.place or run.cell.trial or run.cell.stage].append(run)
    for group in groups.values():
        if len(group) > 1:
            names = ", ".join(run.file for run in group)
            text = f"{names}: {len(group)} results for {group[0].cell}, but no plan to select one"
            problems.append(Problem(text, serious=True, kind="several results for a cell"))
    return [run for group in groups.values() if len(group) == 1 for run in group]
