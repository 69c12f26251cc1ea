"""A sweep, read once from its directory into a value: the plan, the runs, what is missing, and the problems.

Failed checks of a file are reported as problems.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from analysis.results import layout
from analysis.results.artifacts import GradientStudy, ValueStudy
from analysis.results.consistency import inconsistencies, lost_runs, plan_problems
from analysis.results.locked import LockedPlan, Origin
from analysis.results.plan import Plan, plain_key
from analysis.results.problems import Problem as Problem, counted
from analysis.results.rate_choice import choice_problems
from analysis.results.records import Arm, Cell, Failure, Run, read_failure, read_run
from analysis.results.store import (
    DamagedFileError,
    archive_lines,
    archive_path,
    has_archive,
    present,
    published_seconds,
    read_time,
)
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

Artifact = TypeVar("Artifact", ValueStudy, GradientStudy)
Record = TypeVar("Record", Run, Failure)
# The settings that determine the weights from which a run starts.
_STARTS = ("model.policy_path", "model.policy_layers")
# Number of last values of a curve in a log that are not numbers if its run diverged.
_LAST_VALUES = 3
# Number of missing runs that are named.
_NAMED = 10


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as read from its directory.

    Attributes:
        locked: The plan as it is locked, with its cells.
        runs: Results that passed all checks, in order of stage and plan.
        failures: Cells that ended without a result.
        problems: Files that were skipped, and other problems; those of one kind are one, with their number.
        seconds: Id of a cell -> wall time of its run, where it is known.
        lost: Places without a run in an import whose mapping says to leave such replicates out.
        left_out: The runs of those replicates at the same beta, which `runs` lacks.
    """

    directory: Path
    plan: Plan
    locked: LockedPlan
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
        return self.locked.arms

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
        return self.locked.rates

    def studies(self, kind: type[Artifact]) -> list[tuple[Run, Artifact]]:
        """The artifacts of a kind of study, each with its run."""
        return [(run, one) for run in self.runs for one in run.studies if isinstance(one, kind)]

    def study(self, kind: type[Artifact]) -> tuple[Run, Artifact] | None:
        """The artifact of a kind of study with its run; the first one, if there are several."""
        return next(iter(self.studies(kind)), None)

    @property
    def missing(self) -> list[tuple[str, int, int]]:
        """Planned places with neither a result nor a recorded failure, which have still to be run."""
        cells = [one.cell for one in (*self.runs, *self.left_out)] + [one.cell for one in self.failures]
        known = {cell.place for cell in cells} | set(self.lost)
        return [place for place in self.plan.places if place not in known]

    @property
    def invalid(self) -> list[str]:
        """The problems that rule out a verdict; empty if there are none."""
        return [problem.text for problem in self.problems if problem.serious]

    @property
    def warm_starts(self) -> int:
        """Number of different weights from which the runs of the grid started."""
        return len({self._start(run.cell.needs, run.cell.overrides) for run in self.grid.values()})

    @property
    def distinct_blocks(self) -> tuple[int, ...]:
        """For each block of the plan, the position of the first one that is the same.

        The same are blocks whose values agree, whatever the spelling of a path, and whose checkpoints have
        the same weights.
        """
        ids = {run.cell.stage: run.cell.id for run in self.landmarks}
        kinds = []
        for block in self.plan.grid.blocks.values():
            cells = {key: ids.get(stage, stage) for key, stage in block.inputs.items()}
            inputs = {key: self._weights.get(cell, cell) for key, cell in cells.items()}
            values = {**block.overrides, **inputs}
            kinds.append({plain_key(key): _spelled(value) for key, value in values.items()})
        return tuple(map(kinds.index, kinds))

    @cached_property
    def _weights(self) -> dict[str, str]:
        """Id of a cell of a shared stage -> the hash of the weights that it ended with, where it is known."""
        return {run.cell.id: run.weights for run in self.landmarks if run.weights}

    def _start(self, needs: Iterable[str], overrides: Mapping[str, Any]) -> tuple[object, ...]:
        """The weights that a run starts from, as far as they are those of checkpoints or settings."""
        places = (str(_spelled(value)) for key, value in overrides.items() if plain_key(key) in _STARTS)
        return (*(self._weights.get(cell, cell) for cell in needs), *places)


def _spelled(value: Any) -> Any:
    """A value, a path in one of its spellings."""
    return os.path.normpath(value) if isinstance(value, str) else value


def load_sweep(directory: Path) -> Sweep:
    """Read a sweep. Files that fail a check are skipped and listed in `problems`.

    Raises:
        ConfigurationError: If it has no plan or no results, or results in both forms.
        DamagedFileError: If its plan cannot be read.
    """
    problems: list[Problem] = []
    read = {run.cell.id: run for run in _results(directory, problems)}
    failed = [
        *_read_all(
            ((path, None) for path in layout.result_paths(directory, layout.FAILED)), read_failure, problems
        )
    ]
    if not os.path.lexists(path := present(directory / layout.PLAN)):
        raise ConfigurationError(f"{directory}: has no {layout.PLAN}; the directory of a sweep is expected")
    locked = LockedPlan.read(path)
    plan, origin = locked.plan, locked.origin
    problems += plan_problems(locked)
    runs = _planned(read.values(), locked, layout.RESULTS, problems)
    failures = _planned(failed, locked, layout.FAILED, problems)
    runs = _judged(runs, plan, problems, origin)
    problems += inconsistencies(runs, locked)
    published = {run.cell.id for run in runs}
    problems += choice_problems(plan, runs, locked.choice)
    failures = [failure for failure in failures if failure.cell.id not in published]
    problems += lost_runs(failures, plan)
    seconds = _seconds(directory, published, {*read, *locked.cells}, problems)
    order = {place: i for i, place in enumerate(plan.places)}
    runs.sort(key=lambda run: (order.get(run.cell.place or ("", 0, 0), -1), run.cell.id))
    found = Sweep(directory, plan, locked, tuple(runs), tuple(failures), problems, seconds)
    if origin is not None:
        found = _without_incomplete(found, leave_out=origin.leaves_out)
    return replace(found, problems=counted(found.problems))


def _results(directory: Path, problems: list[Problem]) -> Iterator[Run]:
    """The results of a sweep; a second one of a cell, which only an archive can have, is a problem."""
    archived, known = has_archive(directory), set[str]()
    paths = ((path, None) for path in layout.result_paths(directory))
    for run in _read_all(archive_lines(directory) if archived else paths, read_run, problems):
        if run.cell.id in known:
            text = f"{layout.ARCHIVE}: has two results of the cell {run.cell.id}"
            problems.append(Problem(text, serious=True, kind="two results of a cell"))
        else:
            known.add(run.cell.id)
            yield run
    if not known and not problems:
        where = archive_path(directory) if archived else directory
        text = "has no results" if archived else f"no {layout.RESULTS}/*.json"
        raise ConfigurationError(f"{where}: {text}; the directory of a sweep is expected")


def _read_all(
    places: Iterable[tuple[Path, bytes | None]],
    read: Callable[[Path, bytes | None], Record],
    problems: list[Problem],
) -> Iterator[Record]:
    for path, raw in places:
        try:
            yield read(path, raw)
        except (DamagedFileError, OSError) as error:
            problems.append(_unread(path, f"{path.parent.name}/{path.name}", error))


def _unread(path: Path, name: str, error: Exception) -> Problem:
    """A problem for a file that cannot be read, under its name within the directory."""
    text = f"{name}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return Problem(text.replace(str(path), name, 1), unread=True)


def _planned(
    records: Iterable[Record], locked: LockedPlan, folder: str, problems: list[Problem]
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


def _judged(runs: Sequence[Run], plan: Plan, problems: list[Problem], origin: Origin | None) -> list[Run]:
    """The runs, diverged if they lack an outcome that the plan compares, and a problem for each left out.

    In a log of other software a value that is not a number may be a gap: such a run is left out, unless its
    last values are none.
    """
    compared = (schema.KL,) if plan.primary.outcome == schema.KL else (schema.REWARD, schema.KL)
    kept = []
    for run in runs:
        lacks = run.cell.arm is not None and any(key not in run.final for key in compared)
        if origin is not None and (lacks or run.diverged) and not _ends_in_nan(run, compared):
            text = f"{run.file}: {run.cell.title}: the log ends without a number"
            why = f"a run has diverged if its last {_LAST_VALUES} rows have none, and others have"
            kind = "ends without a number"
            problems.append(Problem(f"{text}; {why}", serious=not origin.leaves_out, kind=kind))
        else:
            kept.append(replace(run, diverged=True) if lacks else run)
    return kept


def _ends_in_nan(run: Run, metrics: Sequence[str]) -> bool:
    """Whether the last values of the curve of a metric are not numbers, but earlier ones are."""
    curves = [run.curves[key].value for name in metrics if (key := f"train/{name}") in run.curves]
    ends = [value[-_LAST_VALUES:] for value in curves if np.isfinite(value).any()]
    return any(len(end) == _LAST_VALUES and not np.isfinite(end).any() for end in ends)


def _without_incomplete(sweep: Sweep, *, leave_out: bool) -> Sweep:
    """An import with a problem that names missing runs, and without their replicates if asked for."""
    missing = sweep.missing
    if not missing:
        return sweep
    lost = {place[1:] for place in missing}
    out = [run for run in sweep.runs if run.cell.place is not None and run.cell.place[1:] in lost]
    names = [
        f"{arm}, β = {sweep.plan.grid.beta[index]:g}, replicate {r}" for arm, index, r in missing[:_NAMED]
    ]
    names += [f"{len(missing) - _NAMED} more"] * (len(missing) > _NAMED)
    done = (
        f"left out with them, of the same replicates and β: {len(out)}"
        if leave_out
        else "`incomplete: leave_out_replicate` in the mapping leaves out their replicates at their β"
    )
    text = f"{len(missing)} of {len(sweep.plan.places)} runs are missing: {'; '.join(names)}; {done}"
    sweep = replace(sweep, problems=[*sweep.problems, Problem(text)])
    if not leave_out:
        return sweep
    kept = tuple(run for run in sweep.runs if run not in out)
    return replace(sweep, runs=kept, lost=missing, left_out=tuple(out))


def _seconds(
    directory: Path, results: set[str], known: set[str], problems: list[Problem]
) -> Mapping[str, float]:
    """Cell id -> seconds of the cells with a result, and a problem for each time that is none."""
    if has_archive(directory):
        path = directory / layout.TIMES
        try:
            times = published_seconds(path)
        except (DamagedFileError, OSError) as error:
            problems.append(_unread(path, layout.TIMES, error))
            return {}
        if unknown := sorted(times.keys() - known):
            text = f"{len(unknown)} of its ids are of no cell, such as {unknown[0][:60]!r}"
            problems.append(Problem(f"{layout.TIMES}: {text}"))
    else:
        paths = {name: layout.workdir(directory, name) / layout.SECONDS for name in sorted(results)}
        times = {name: seconds for name, path in paths.items() if (seconds := read_time(path)) is not None}
        for name, path in paths.items():
            if name not in times and os.path.lexists(path):
                place = path.relative_to(directory)
                problems.append(Problem(f"{place}: not a time from 0.001 to 1e+09 seconds"))
    return {name: times[name] for name in sorted(results) if name in times}
