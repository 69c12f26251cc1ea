"""`python -m analysis plan`: the cells of a sweep, their time and the power."""

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from analysis.design import expand, read_plan, smallest_p, with_source
from analysis.results import Cell, Plan, layout
from analysis.results.locked import LockedPlan
from analysis.results.rate_choice import at_the_edge
from analysis.results.records import Arm
from analysis.sweep import Clock, Locked, State, Store, duration, lock, survey
from lit_klrb.terminal import print_table, say_loading

# Assumed time of cells of a stage without a finished cell.
ASSUMED_SECONDS = 60.0
# Beginnings of the changes that give every cell another id.
_IN_IDS = ("environment.", "configs.")
# Descriptions of the outcomes that can decide.
_DECIDES = {
    "objective": "J = reward - beta * KL at the run's own beta, each beta counting the same",
    "kl": "the KL alone, each beta counting the same",
}


def open_plan(arguments: argparse.Namespace, *, record: bool) -> tuple[Plan, list[Cell], Store, int, Locked]:
    """Read the plan, lock it in its directory, and print what changed since it was locked."""
    plan = read_plan(arguments.config)
    if arguments.source is not None:
        plan = with_source(plan, arguments.source)
    say_loading(f"checking the {len(plan.grid.arms)} arms of {plan.name}")
    expansion = expand(plan)
    store = Store(Path(plan.directory).absolute())
    locked = lock(plan, expansion, store.directory, record=record)
    for change in locked.changes:
        print(f"{plan.name}: changed since the plan was locked: {change}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return plan, expansion.cells, store, arguments.workers or max(1, cores // plan.threads), locked


def _unused(cells: Sequence[Cell], store: Store, changes: Sequence[str]) -> str | None:
    """A sentence on results in the directory that are of other cells, and why; None if there are none."""
    published = layout.result_paths(store.directory)
    others = {path.stem for path in published} - {cell.id for cell in cells}
    if not others:
        return None
    keys = [change.partition(": ")[0] for change in changes]
    causes = [key for key in keys if key.startswith(_IN_IDS) or key == "plan.root_seed"]
    why = (
        f"what the ids of cells depend on has changed: {', '.join(causes)}" if causes else "the grid differs"
    )
    return f"  {len(others)} of {len(published)} results in {store.directory} are of other cells: {why}"


def plan_command(arguments: argparse.Namespace) -> int:
    """Print what would run, how long it takes and what it could show; writes the locked plan."""
    plan, cells, store, workers, locked = open_plan(arguments, record=False)
    states = survey(cells, store)
    if arguments.cells:
        rows = [(cell.id[:12], states[cell.id].value, str(cell.seed), str(cell)) for cell in cells]
        print_table(("id", "state", "seed", "cell"), rows)
    arms = [(label, arm.name, arm.optimises or "") for label, arm in locked.arms.items()]
    print_table(("arm", "estimator", "its gradient optimises"), arms)
    print("\n".join([*_outcomes(locked.arms), *_attainable(plan)]))
    for line in at_the_edge(plan, LockedPlan.read(store.directory / layout.PLAN).rates):
        print(f"  {line}")
    todo = [cell for cell in cells if states[cell.id] is State.TODO]
    print(f"{plan.name}: {len(cells)} cells, {len(todo)} to run, in {plan.directory}")
    if unused := _unused(cells, store, locked.changes):
        print(unused)
    if todo:
        _print_time(todo, Clock(cells, store), workers)
    if plan.comparisons:
        # Imported here as the statistics are slow to import
        from analysis.report.power import power

        print("\n".join(power(plan, arguments.pilot)))
    return 0


def _print_time(todo: Sequence[Cell], clock: Clock, workers: int) -> None:
    rows = []
    for stage, count in Counter(cell.stage for cell in todo).items():
        seconds = clock.mean(stage)
        each = f"{seconds:.0f} s" if seconds else f"{ASSUMED_SECONDS:.0f} s (assumed: no time is known)"
        rows.append((stage, str(count), each))
    print_table(("stage", "to run", "each"), rows)
    left = clock.left(todo, workers, ASSUMED_SECONDS)
    assert left is not None
    print(f"about {duration(left)} with {workers} at a time")


def _outcomes(arms: Mapping[str, Arm]) -> Iterator[str]:
    """Lines where an arm's evaluation differs from the control's."""
    for label, arm in arms.items():
        for key, (own, control) in arm.evaluation.items():
            yield f"{label} is evaluated with {key} = {own}, the control with {control}: not the same outcome"


def _blocks(plan: Plan) -> Iterator[str]:
    """A line with the blocks, if there are any."""
    blocks, few = plan.grid.blocks, "" if plan.grid.over_blocks else "; too few for a verdict on others"
    if blocks:
        each = plan.grid.replicates // len(blocks)
        yield f"  {len(blocks)} blocks of {each} replicates ({', '.join(blocks)}){few}"


def _attainable(plan: Plan) -> list[str]:
    """Lines with the smallest p-value that the design allows."""
    grid, primary, others = plan.grid, plan.primary, plan.comparisons
    if not others:
        return [f"nothing is compared: {primary.control} is the only arm"]
    least = 0.0 if grid.over_blocks else smallest_p(plan.pairs)  # a t test can attain any p
    test = "t test over blocks" if grid.over_blocks else f"smallest two-sided p of a swap test {least:.2g}"
    verdict = "can reject" if least <= plan.level else "CANNOT reject, whatever the results"
    shared = plan.starting_points
    lines = [
        f"{', '.join(others)} against {primary.control}, by {_DECIDES[primary.outcome]}",
        f"  {len(grid.beta)} betas x {grid.replicates} replicates = {plan.pairs} matched pairs",
        *_blocks(plan),
        f"  {test}, level {plan.level:.2g} (alpha {primary.alpha:g} over {len(others)}): {verdict}",
    ]
    if plan.tuning:
        rates = sorted(plan.tuning.rates)
        lines.append(
            f"  each arm at one of {len(rates)} rates from {rates[0]:g} to {rates[-1]:g} of "
            f"{plan.tuning.key}, chosen by {plan.tuning.replicates} runs at each rate and beta"
        )
    if shared:
        lines.append(f"  all runs share one {' and one '.join(shared)}: what is found holds given these")
    return lines
