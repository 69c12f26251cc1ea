"""`python -m analysis sweep`: run what is missing."""

import argparse
import math
import shlex
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from analysis.cli.plan import open_plan
from analysis.results import Cell, Plan
from analysis.results.store import read_result
from analysis.sweep import Coordinator, Ended, Progress, State, Store
from analysis.sweep.launchers import Options, launcher as launcher_of
from lit_klrb.errors import ConfigurationError, printable
from lit_klrb.stops import Stopped, Stops

_STOPPING = "stopping: running cells save after this step; once more to stop at once, without saving"


def sweep_command(arguments: argparse.Namespace) -> int:
    """Run the sweep, print how it ended; 0 if it is complete."""
    _check_launcher(arguments)
    plan, cells, store, _, _ = open_plan(arguments, record=True)
    launcher = launcher_of(arguments.launcher)(
        Options(
            arguments.workers, plan.threads, plan.module, store.directory, arguments.address, arguments.slurm
        )
    )
    deadline = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    with Stops(later=_STOPPING) as stops, Progress(plan.name, Console()) as progress:
        coordinator = Coordinator(plan, cells, store, launcher, progress)
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
        _print_answer(store)
    return 0 if outcome.complete else 1


def _print_answer(store: Store) -> None:
    """Print what the results say, and the command that writes their page."""
    from analysis.report.answer import sentence_of  # imported here as the statistics are slow to import
    from analysis.report.assessment import load_assessment

    print(printable(sentence_of(load_assessment(store.directory))))
    print(f"its page: {shlex.join(['python', '-m', 'analysis', 'report', str(store.directory)])}")


def _check_launcher(arguments: argparse.Namespace) -> None:
    """Check the options of the launcher, before the plan is examined."""
    for option, launcher in (("address", "ray"), ("slurm", "slurm")):
        if (given := getattr(arguments, option)) and arguments.launcher != launcher:
            raise ConfigurationError(f"--{option} {given} needs --launcher {launcher}")
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
