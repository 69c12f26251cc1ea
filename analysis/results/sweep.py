"""A sweep, read once from its directory into a value: the plan, the runs, what is missing, and the problems.

Files that fail a check of their own are problems here; `analysis.checks` compares them with each other.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from analysis.results import layout, store
from analysis.results.artifacts import GradientStudy, ValueStudy
from analysis.results.locked import LockedPlan
from analysis.results.plan import Plan
from analysis.results.records import Cell, Failure, Run, read_failure, read_run
from analysis.results.store import DamagedFileError
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

Artifact = TypeVar("Artifact", ValueStudy, GradientStudy)
Record = TypeVar("Record", Run, Failure)
# Number of last values of a curve in a log that are not numbers if its run diverged.
_LAST_VALUES = 3


@dataclass(frozen=True)
class Problem:
    """A problem with the files of a sweep."""

    text: str  # one line that names the problem and the file
    # Whether it rules out a verdict, because the design that the tests assume cannot be trusted
    serious: bool = False
    unread: bool = False  # whether it is a file that could not be read, whose content is not known
    kind: str = ""  # what it has in common with others that are counted with it; "" if it stands alone


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as read from its directory."""

    directory: Path
    plan: Plan
    locked: LockedPlan  # the plan as it is locked, with its cells
    runs: tuple[Run, ...]  # results that passed all checks, in order of stage and plan
    failures: tuple[Failure, ...]  # cells that ended without a result
    # Files that were skipped, and other problems; those of one kind are one, with their number
    problems: Sequence[Problem]
    # Id of a cell -> wall time of its run, where it is known
    seconds: Mapping[str, float] = field(default_factory=dict)
    # Places without a run in an import whose mapping says to leave such replicates out
    lost: Sequence[tuple[str, int, int]] = ()
    left_out: tuple[Run, ...] = ()  # the runs of those replicates at the same beta, which `runs` lacks

    @property
    def grid(self) -> dict[tuple[str, int, int], Run]:
        """Runs of the grid by (arm, beta index, replicate)."""
        return {run.cell.place: run for run in self.runs if run.cell.place is not None}

    @cached_property  # asked for by each run of the grid
    def landmarks(self) -> list[Run]:
        """Runs of the shared stages without studies: the reference and the warm start."""
        return [run for run in self.runs if run.cell.arm is None and not (run.studies or run.other_studies)]

    @property
    def trials(self) -> list[Run]:
        """Runs of the tuning stage."""
        return [run for run in self.runs if run.cell.trial is not None]

    def studies(self, kind: type[Artifact]) -> list[tuple[Run, Artifact]]:
        """The artifacts of a kind of study, each with its run."""
        return [(run, one) for run in self.runs for one in run.studies if isinstance(one, kind)]

    @property
    def missing(self) -> list[tuple[str, int, int]]:
        """Planned places with neither a result nor a recorded failure, which have still to be run."""
        cells = [one.cell for one in (*self.runs, *self.left_out)] + [one.cell for one in self.failures]
        known = {cell.place for cell in cells} | set(self.lost)
        return [point for point in self.plan.places if point not in known]

    @property
    def invalid(self) -> list[str]:
        """The problems that rule out a verdict; empty if there are none."""
        return [problem.text for problem in self.problems if problem.serious]


def read_sweep(directory: Path) -> Sweep:
    """Read a sweep. Files that cannot be read or are not in the plan are skipped and listed in `problems`.

    Raises:
        ConfigurationError: If it has no plan or no results, or results in both forms.
        DamagedFileError: If its plan cannot be read.
    """
    problems: list[Problem] = []
    read = list(_results(directory, problems))
    failed = list(_read_all(layout.result_paths(directory, layout.FAILED), read_failure, problems))
    if not os.path.lexists(path := store.present(directory / layout.PLAN)):
        raise ConfigurationError(f"{directory}: has no {layout.PLAN}; the directory of a sweep is expected")
    locked = LockedPlan.read(path)
    runs = list(_judged(_planned(read, locked, layout.RESULTS, problems), locked, problems))
    published = {run.cell.id for run in runs}
    failures = _planned(failed, locked, layout.FAILED, problems)
    seconds = _seconds(directory, published, problems)
    order = {point: i for i, point in enumerate(locked.plan.places)}
    runs.sort(key=lambda run: (order.get(run.cell.place or ("", 0, 0), -1), run.cell.id))
    lost = tuple(failure for failure in failures if failure.cell.id not in published)
    return Sweep(directory, locked.plan, locked, tuple(runs), lost, problems, seconds)


def _results(directory: Path, problems: list[Problem]) -> Iterator[Run]:
    """The results of a sweep; a second one of a cell, which only an archive can have, is a problem."""
    archived, known = store.has_archive(directory), set[str]()
    places = store.archive_lines(directory) if archived else layout.result_paths(directory)
    for run in _read_all(places, read_run, problems):
        if run.cell.id in known:
            text = f"{layout.ARCHIVE}: has two results of the cell {run.cell.id}"
            problems.append(Problem(text, serious=True, kind="two results of a cell"))
        else:
            known.add(run.cell.id)
            yield run
    if not known and not problems:
        where = store.archive_path(directory) if archived else directory
        text = "has no results" if archived else f"no {layout.RESULTS}/*.json"
        raise ConfigurationError(f"{where}: {text}; the directory of a sweep is expected")


def _read_all(
    places: Iterable[Path | tuple[Path, bytes]],
    read: Callable[[Path, bytes | None], Record],
    problems: list[Problem],
) -> Iterator[Record]:
    """Read files, or the lines of an archive, each with its place."""
    for source in places:
        path, raw = source if isinstance(source, tuple) else (source, None)
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
) -> Iterator[Record]:
    """The runs or failures that match the plan, with its cells, and a problem for each other one."""
    for record in records:
        difference = _difference(record.cell, locked)
        if difference is None:
            yield replace(record, cell=locked.cells[record.cell.id])
        else:
            text, kind = (
                f"{folder}/{record.cell.id}.json: {difference}",
                f"{folder}: {difference.partition(' is ')[0]}",
            )
            problems.append(Problem(text, serious=folder == layout.RESULTS, kind=kind))


def _difference(cell: Cell, locked: LockedPlan) -> str | None:
    """Why a record does not match the plan; None if it does."""
    planned = locked.cells.get(cell.id)
    if planned is None:
        return "its id is not in the plan"
    expected = planned.record()
    for key, value in cell.record().items():
        if key != "arm" and value != expected[key]:  # an arm may have been renamed
            return f"its {key} is {value!r}, the plan has {expected[key]!r}"
    return None


def _judged(runs: Iterable[Run], locked: LockedPlan, problems: list[Problem]) -> Iterator[Run]:
    """The runs, diverged if they lack an outcome that the plan compares, and a problem for each left out.

    In a log of other software a value that is not a number may be a gap: such a run is left out, unless its
    last values are none.
    """
    by_kl = locked.plan.primary.outcome == schema.KL
    compared = (schema.KL,) if by_kl else (schema.REWARD, schema.KL)
    for run in runs:
        lacks = run.cell.arm is not None and any(key not in run.final for key in compared)
        if locked.origin and (lacks or run.diverged) and not _ends_in_nan(run, compared):
            text = f"{run.file}: {run.cell.title}: the log ends without a number"
            why = f"a run has diverged if its last {_LAST_VALUES} rows have none, and others have"
            serious, kind = locked.origin.incomplete == "withhold", "ends without a number"
            problems.append(Problem(f"{text}; {why}", serious=serious, kind=kind))
        else:
            yield replace(run, diverged=True) if lacks else run


def _ends_in_nan(run: Run, metrics: Sequence[str]) -> bool:
    """Whether the last values of the curve of a metric are not numbers, but earlier ones are."""
    curves = [run.curves[key].value for name in metrics if (key := f"train/{name}") in run.curves]
    ends = [value[-_LAST_VALUES:] for value in curves if np.isfinite(value).any()]
    return any(len(end) == _LAST_VALUES and not np.isfinite(end).any() for end in ends)


def _seconds(directory: Path, results: set[str], problems: list[Problem]) -> Mapping[str, float]:
    """Cell id -> seconds of the cells with a result, and a problem for each time that is none."""
    times: dict[str, float] = {}
    if store.has_archive(directory):
        path = directory / layout.TIMES
        try:
            times = store.published_seconds(path)
        except (DamagedFileError, OSError) as error:
            problems.append(_unread(path, layout.TIMES, error))
        return {name: times[name] for name in sorted(results & times.keys())}
    for name in sorted(results):
        path = layout.workdir(directory, name) / layout.SECONDS
        if (seconds := store.read_time(path)) is not None:
            times[name] = seconds
        elif os.path.lexists(path):
            place = path.relative_to(directory)
            problems.append(Problem(f"{place}: not a time from 0.001 to 1e+09 seconds"))
    return times
