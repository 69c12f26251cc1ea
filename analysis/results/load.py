"""Reads the directory of a sweep and checks every file; failed checks are reported as problems."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from analysis.results import layout
from analysis.results.archive import archive_lines, archive_path, has_archive
from analysis.results.cell import Cell, Trial
from analysis.results.consistency import inconsistencies, lost_runs
from analysis.results.files import DamagedFileError, present
from analysis.results.grid import Grid
from analysis.results.locked import LockedPlan
from analysis.results.plan import Plan, Primary
from analysis.results.records import Failure, Run, decode_run, read_failure, read_run
from analysis.results.seconds import read_seconds
from analysis.results.stage import Stage
from analysis.results.sweep import Problem, Sweep
from analysis.results.tuning import tuning_problems
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

Record = TypeVar("Record", Run, Failure)
# Number of last values of a curve in a log that are not numbers if its run diverged.
_LAST_VALUES = 3


def load_sweep(directory: Path) -> Sweep:
    """Read a sweep. Files that fail a check are skipped and listed in `problems`.

    Args:
        directory: The sweep's directory, with a `results` folder or an archive of it.

    Raises:
        ConfigurationError: If it has no results, or both.
        DamagedFileError: If its plan cannot be read.
    """
    problems: list[Problem] = []
    runs = (_read_archive if has_archive(directory) else _read_results)(directory, problems)
    failures = _read_all(layout.failure_paths(directory), read_failure, problems)
    known = {run.cell.id for run in runs}
    if os.path.lexists(path := present(directory / layout.PLAN)):
        locked = LockedPlan.read(path)
        plan = locked.plan
        problems += _plan_problems(locked)
        runs = _planned(runs, locked, layout.RESULTS, problems)
        failures = _planned(failures, locked, layout.FAILED, problems)
    else:
        locked, plan = None, _inferred_plan(directory, [run.cell for run in runs])
        runs = _without_duplicates(runs, problems)
    imported = locked is not None and locked.imported_from is not None
    runs = _matched(_judged(runs, plan, problems, imported=imported), plan, problems)
    units_unknown = locked is not None and locked.units_unknown
    problems += inconsistencies(runs, plan, imported=imported, units_unknown=units_unknown)
    published = {run.cell.id for run in runs}
    problems += tuning_problems(plan, runs, locked.choice if locked else None)
    failures = [failure for failure in failures if failure.cell.id not in published]
    problems += lost_runs(failures, plan)
    seconds, time_problems = read_seconds(directory, published, known | set(locked.cells if locked else ()))
    problems += time_problems
    order = {place: i for i, place in enumerate(plan.places)}
    return Sweep(
        directory,
        plan,
        locked,
        tuple(sorted(runs, key=lambda run: (order.get(run.cell.place or ("", 0, 0), -1), run.cell.id))),
        tuple(failures),
        problems,
        seconds,
    )


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
            problems.append(Problem(f"{text}; {why}", serious=True))
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
    return _read_all(paths, read_run, problems)


def _read_archive(directory: Path, problems: list[Problem]) -> list[Run]:
    """The runs of an archive; a second line with the same cell, which no sweep writes, is a problem."""
    lines = archive_lines(directory)
    if not lines:
        raise ConfigurationError(f"{archive_path(directory)}: has no results")
    found: dict[str, Run] = {}
    for run in _read_all(list(lines), lambda line: decode_run(line, lines[line]), problems):
        if run.cell.id in found:
            text = f"{layout.ARCHIVE}: has two results of the cell {run.cell.id}"
            problems.append(Problem(text, serious=True))
        found.setdefault(run.cell.id, run)
    return list(found.values())


def _read_all(paths: Sequence[Path], read: Callable[[Path], Record], problems: list[Problem]) -> list[Record]:
    found: list[Record] = []
    for path in paths:
        try:
            found.append(read(path))
        except DamagedFileError as error:
            # The message starts with the path; within the directory the end of it is enough.
            problems.append(Problem(str(error).replace(str(path), _name(path), 1), unread=True))
        except OSError as error:
            problems.append(Problem(f"{_name(path)}: {error.strerror}", unread=True))
    return found


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _plan_problems(locked: LockedPlan) -> list[Problem]:
    """Problems of the locked plan: its hash, cells that do not match its grid, imports, evaluations."""
    found = []
    if not locked.recomputed:
        found.append(
            f"{layout.PLAN}: does not have the hash {locked.hash[:12]} that it is locked with; it was edited "
            "after it was locked"
        )
    grid, plan = [cell.point for cell in locked.cells.values() if cell.point is not None], locked.plan
    trials = [cell.trial for cell in locked.cells.values() if cell.trial is not None]
    if sorted(point.place for point in grid) != sorted(plan.places) or sorted(trials) != sorted(plan.trials):
        found.append(f"{layout.PLAN}: its cells are not those of its grid")
    else:
        alien = [point for point in grid if point.beta != plan.grid.beta[point.beta_index]]
        found += [f"{layout.PLAN}: a cell has beta {point.beta:g}, not its grid's" for point in alien[:1]]
        found += [f"{layout.PLAN}: {cell} is not of its block" for cell in _of_other_blocks(locked)][:1]
    problems = [Problem(text, serious=True) for text in found]
    if locked.imported_from is not None:
        problems.append(
            Problem(
                f"the runs were imported from {locked.imported_from}: they were not scored by the common "
                "evaluator; reward and KL are what the software that trained them logged"
            )
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
        reason = _difference(record.cell, locked)
        if reason is None:
            kept.append(replace(record, cell=locked.cells[record.cell.id]))
        else:
            text = f"{folder}/{record.cell.id}.json: {reason}"
            problems.append(Problem(text, serious=folder == layout.RESULTS))
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

    def reason(run: Run) -> str | None:
        point = run.cell.point
        if point is None:
            return None
        index, replicate, beta = point.beta_index, point.replicate, plan.grid.beta.get(point.beta_index)
        if len(own := sorted(seeds[index, replicate])) > 1:
            return f"the runs of beta index {index}, replicate {replicate} have different seeds: {own}"
        if not 0 <= replicate < plan.grid.replicates:
            return f"there is no replicate {replicate}"
        return None if beta == point.beta else f"its beta is {point.beta:g}, expected {beta}"

    reasons = {run.cell.id: text for run in runs if (text := reason(run))}
    problems += [
        Problem(f"{run.file}: {reasons[run.cell.id]}", serious=True) for run in runs if run.cell.id in reasons
    ]
    return [run for run in runs if run.cell.id not in reasons]


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
            problems.append(Problem(text, serious=True))
    return [run for group in groups.values() if len(group) == 1 for run in group]
