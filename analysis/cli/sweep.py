"""`lit-klrb plan` and `sweep`: the cells of a sweep, their time and power, and running them."""

import argparse
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.design import expand, read_plan
from analysis.design.rates import at_the_edge
from analysis.design.resources import gpus_of, processes_of
from analysis.results import Cell, Plan, layout
from analysis.results.locked import LockedPlan
from analysis.results.records import Arm
from analysis.results.store import read_result
from analysis.sweep import Clock, Coordinator, Ended, Progress, State, Store, duration, lock, survey
from analysis.sweep.launchers import Options, launcher as launcher_of
from analysis.sweep.launchers.local import LocalLauncher, places
from lit_klrb.errors import ConfigurationError, printable
from lit_klrb.stops import Stopped, Stops
from lit_klrb.terminal import print_lines, print_table, say_loading

# Assumed time of cells of a stage without a finished cell.
ASSUMED_SECONDS = 60.0
# Beginnings of the changes that give every cell another id.
_IN_IDS = ("environment.", "configs.", "plan.root_seed")
# Descriptions of the outcomes that can decide.
_DECIDES = {
    "objective": "J = reward - beta * KL at the run's own beta, each beta counting the same",
    "kl": "the KL alone, each beta counting the same",
}


def open_plan(
    arguments: argparse.Namespace, *, record: bool
) -> tuple[Plan, list[Cell], Store, list[str], Mapping[str, Arm]]:
    """Read the plan, lock it in its directory, and list what changed since it was locked."""
    plan = read_plan(arguments.config)
    say_loading(f"checking the {len(plan.grid.arms)} arms of {plan.name}")
    expansion = expand(plan)
    store = Store(Path(plan.directory).absolute())

    def meanwhile() -> None:
        if record and arguments.launcher == "local":
            LocalLauncher(1, plan.threads, plan.module).start()

    changes, arms = lock(plan, expansion, store.directory, record=record, meanwhile=meanwhile)
    return plan, expansion.cells, store, changes, arms


def _print_changes(plan: Plan, changes: Sequence[str]) -> None:
    for change in changes:
        print(f"{plan.name}: changed since the plan was locked: {change}")


def _unused(cells: Sequence[Cell], store: Store, changes: Sequence[str]) -> str | None:
    """A sentence on results in the directory that are of other cells, and why; None if there are none."""
    published = layout.result_paths(store.directory)
    others = {path.stem for path in published} - {cell.id for cell in cells}
    if not others:
        return None
    causes = ", ".join(change.partition(": ")[0] for change in changes if change.startswith(_IN_IDS))
    why = f"what the ids of cells depend on has changed: {causes}" if causes else "the grid differs"
    return f"  {len(others)} of {len(published)} results in {store.directory} are of other cells: {why}"


def plan_command(arguments: argparse.Namespace) -> int:
    """Print what would run, how long it takes and what it could show; writes the locked plan."""
    plan, cells, store, changes, locked = open_plan(arguments, record=False)
    states = survey(cells, store)
    if arguments.json:
        print(json.dumps(_as_json(arguments, plan, cells, store, changes, locked), indent=2))
        return 0
    _print_changes(plan, changes)
    if arguments.cells:
        table = [(cell.id[:12], states[cell.id].value, str(cell.seed), str(cell)) for cell in cells]
        print_table(("id", "state", "seed", "cell"), table)
    arms = []
    for label, arm in locked.items():
        name = arm.estimator or arm.module or "unknown"
        arms.append(
            (label, name + ", biased" * arm.biased, (arm.optimises or "").removeprefix("the gradient of "))
        )
    print_table(("arm", "estimator", "optimises"), arms)
    for label, arm in locked.items():
        for key, (value, control) in arm.evaluation.items():
            values = f"{key} = {value}, the control with {control}"
            print(f"{label} is evaluated with {values}: not the same outcome")
    print_lines(*_compared(plan))
    for line in at_the_edge(plan, LockedPlan.read(store.directory / layout.PLAN).rates):
        print_lines(f"  {line}")
    todo = [cell for cell in cells if states[cell.id] is State.TODO]
    print(f"{plan.name}: {len(cells)} cells, {len(todo)} to run, in {plan.directory}")
    if unused := _unused(cells, store, changes):
        print_lines(unused)
    if todo:
        _print_time(todo, Clock(cells, store), _workers(arguments, plan, cells))
    if plan.comparisons:
        # Imported here as the statistics are slow to import
        from analysis.report.power import power

        print_lines(*power(plan, arguments.pilot))
    return 0


def _as_json(
    arguments: argparse.Namespace,
    plan: Plan,
    cells: Sequence[Cell],
    store: Store,
    changes: Sequence[str],
    locked: Mapping[str, Arm],
) -> dict[str, Any]:
    """What `plan` says, for programs; `seconds` is null where no time of a stage is known."""
    from analysis.report.power import power_numbers

    states, workers = survey(cells, store), _workers(arguments, plan, cells)
    todo = [cell for cell in cells if states[cell.id] is State.TODO]
    return {
        "name": plan.name,
        "directory": plan.directory,
        "control": plan.primary.control,
        "outcome": plan.primary.outcome,
        "arms": {
            label: {"estimator": arm.estimator, "biased": arm.biased, "optimises": arm.optimises}
            for label, arm in locked.items()
        },
        "pairs": plan.pairs,
        "cells": [
            {"id": cell.id, "state": states[cell.id].value, "seed": cell.seed, "cell": str(cell)}
            for cell in cells
        ],
        "to_run": len(todo),
        "workers": workers,
        "seconds": Clock(cells, store).left(todo, workers) if todo else 0,
        "changed": [*changes],
        "power": power_numbers(plan, arguments.pilot) if plan.comparisons else None,
    }


def _workers(arguments: argparse.Namespace, plan: Plan, cells: Sequence[Cell]) -> int:
    processes, gpus = _largest(plan, cells)
    workers: int = arguments.workers or places(plan.threads * processes, gpus)
    return workers


def _largest(plan: Plan, cells: Sequence[Cell]) -> tuple[int, int]:
    """The largest number of processes of a cell, and of GPUs."""
    return max(map(processes_of, cells)), max(gpus_of(plan, cell) for cell in cells)


def _print_time(todo: Sequence[Cell], clock: Clock, workers: int) -> None:
    table = []
    for stage, count in Counter(cell.stage for cell in todo).items():
        seconds = clock.mean(stage)
        each = f"{seconds:.0f} s" if seconds else f"{ASSUMED_SECONDS:.0f} s (assumed: no time is known)"
        table.append((stage, str(count), each))
    print_table(("stage", "to run", "each"), table)
    left = clock.left(todo, workers, ASSUMED_SECONDS)
    assert left is not None
    print(f"about {duration(left)} with {workers} at a time")


def _compared(plan: Plan) -> list[str]:
    """Lines with what is compared, and by how many pairs."""
    grid, primary, others = plan.grid, plan.primary, plan.comparisons
    if not others:
        return [f"nothing is compared: {primary.control} is the only arm"]
    betas = "beta" if len(grid.beta) == 1 else "betas"
    lines = [
        f"{', '.join(others)} against {primary.control}, by {_DECIDES[primary.outcome]}",
        f"  {len(grid.beta)} {betas} x {grid.replicates} replicates = {plan.pairs} matched pairs",
    ]
    if blocks := grid.blocks:
        each = grid.replicates // len(blocks)
        lines.append(f"  {len(blocks)} blocks of {each} replicates ({', '.join(blocks)})")
    if plan.tuning:
        rates = sorted(plan.tuning.rates)
        lines.append(
            f"  each arm at one of {len(rates)} rates from {rates[0]:g} to {rates[-1]:g} of "
            f"{plan.tuning.key}, chosen by {plan.tuning.replicates} runs at each rate and beta"
        )
    if shared := plan.starting_points:
        lines.append(f"  all runs share one {' and one '.join(shared)}: what is found holds given these")
    return lines


_STOPPING = "stopping: running cells save after this step; once more to stop at once, without saving"


def sweep_command(arguments: argparse.Namespace) -> int:
    """Run the sweep, print how it ended; 0 if it is complete."""
    _check_launcher(arguments)
    plan, cells, store, changes, _ = open_plan(arguments, record=True)
    _print_changes(plan, changes)
    options = arguments.workers, plan.threads, plan.module, store.directory, *_largest(plan, cells)
    launcher = launcher_of(arguments.launcher)(Options(*options, arguments.address, arguments.slurm))
    deadline = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    with Stops(later=_STOPPING) as stops, Progress(plan.name, Console()) as progress:
        coordinator = Coordinator(plan, cells, store, launcher, progress, arguments.storage)
        outcome = coordinator.run(lambda: stops.asked is not None or time.monotonic() >= deadline)
    for cell in cells:
        # Link the stages from which all runs start to the directories named by their configurations
        if cell.arm is None and outcome.states[cell.id] is State.DONE:
            store.link(cell.stage, cell.id)
    _print_outcome(plan, cells, store, outcome)
    if outcome.stopped and stops.asked is not None:
        stopped = Stopped(stops.asked)
        stopped.add_note(f"to resume: {arguments.command}")
        raise stopped
    if outcome.stopped:
        print(f"stopped after {arguments.minutes:g} minutes; to resume: {arguments.command}")
    if outcome.complete and plan.comparisons:
        # Imported here as the statistics are slow to import
        from analysis.report.assessment import load_assessment, sentence_of

        print_lines(printable(sentence_of(load_assessment(store.directory))))
        print(f"its page: {shlex.join(['lit-klrb', 'report', str(store.directory)])}")
    return 0 if outcome.complete else 1


def _check_launcher(arguments: argparse.Namespace) -> None:
    """Check the options of the launcher, before the plan is examined."""
    for option, launcher in (("address", "ray"), ("slurm", "slurm")):
        if (value := getattr(arguments, option)) and arguments.launcher != launcher:
            raise ConfigurationError(f"--{option} {value} needs --launcher {launcher}")
    launcher_of(arguments.launcher)


def _print_outcome(plan: Plan, cells: Sequence[Cell], store: Store, outcome: Ended) -> None:
    """Print how the sweep ended, and each cell without a result."""
    counts = Counter(outcome.states.values())
    ended = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
    ran = f"{outcome.ran} run now" if outcome.ran else "no cell was run"
    print(f"{plan.name}: {len(cells)} cells: {ended}; {ran}")
    for cell in cells:
        state = outcome.states[cell.id]
        if state is State.FAILED:
            print(f"failed: {cell}; its log: {store.log(cell.id)}")
        elif state is State.BLOCKED:
            print(f"blocked: {cell}; {outcome.reasons[cell.id]}")
    for path in outcome.refused:
        published, refused = store.result(path.stem), read_result(path)
        assert published is not None
        members = ", ".join(key for key in refused if key != "checksum" and refused[key] != published[key])
        print(f"not deterministic: {path} differs from the published result of the same cell in: {members}")
