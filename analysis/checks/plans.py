"""Checks of a locked plan: its hash, its cells with their seeds and ids, and what an import states."""

from collections.abc import Iterator, Mapping

from analysis.checks.traces import grouped
from analysis.design.cells import cell_id, cell_seed
from analysis.design.fingerprint import names_input
from analysis.results import layout
from analysis.results.keys import BETA, SEED, flat
from analysis.results.locked import CONFIGS, LockedPlan
from analysis.results.plan import Plan
from analysis.results.records import Cell
from analysis.results.store import digest
from analysis.results.sweep import Problem
from lit_klrb import schema

# What no log shows, as a question, and the line by which a mapping answers yes.
UNSTATED = {
    "reward_unit: task": "do all runs use one reward, of the same scale and sign, without the KL penalty?",
    "kl_unit: sequence": "is every KL KL(policy \u2016 reference), summed over a completion?",
}


def plan_problems(locked: LockedPlan) -> Iterator[Problem]:
    """Problems of a locked plan: its hash, cells that do not match it, imports, evaluations."""
    if not locked.recomputed:
        text = f"does not have the hash {locked.hash[:12]} that it is locked with; it was edited after it was"
        yield Problem(f"{layout.PLAN}: {text} locked", serious=True)
    for text in _alien_cells(locked):
        yield Problem(text, serious=True)
    if (origin := locked.origin) is not None:
        text = f"the runs were imported from {origin.source}: they were not scored by the common evaluator"
        yield Problem(f"{text}; reward and KL are what the software that trained them logged")
        if origin.repeated_rows:
            yield Problem(f"{origin.repeated_rows} rows stood twice in what was imported and count once")
        yield from map(Problem, unstated(locked))
    control = locked.plan.primary.control
    for label, arm in locked.arms.items():
        for key, (value, other) in arm.evaluation.items():
            text = f"{label} was evaluated with {key} = {value}, {control} with {other}"
            yield Problem(text, serious=True)


def unstated(locked: LockedPlan) -> list[str]:
    """One line on each thing that no log shows and the mapping of an import does not state."""
    if (origin := locked.origin) is None:
        return []
    rewards = origin.reward_unit is not None or locked.plan.primary.outcome == schema.KL
    known = (rewards, origin.kl_unit is not None)
    lines = (f"{question} If so, add `{line}` to the mapping" for line, question in UNSTATED.items())
    return [f"unknown: {line}" for line, stated in zip(lines, known, strict=True) if not stated]


def _alien_cells(locked: LockedPlan) -> Iterator[str]:
    """One line on cells that the plan does not give, and on each pair with several seeds."""
    plan, cells = locked.plan, locked.cells.values()
    grid = [cell.place for cell in cells if cell.place is not None]
    trials = [cell.trial for cell in cells if cell.trial is not None]
    if sorted(grid) != sorted(plan.places) or sorted(trials) != sorted(plan.trials):
        yield f"{layout.PLAN}: its cells are not those of its grid"
        return
    ids = {cell.stage: cell.id for cell in cells if cell.arm is None}
    alien = [(cell, what) for cell in cells for what in _differences(cell, plan, ids)]
    alien += [] if locked.origin else _not_recomputed(locked)
    yield from (f"{layout.PLAN}: {cell}: {what}" for cell, what in alien[:1])
    seeds = grouped(((cell.place[1:], cell.seed) for cell in cells if cell.place), lambda pair: pair[0])
    for (index, replicate), pairs in seeds.items():
        if len(distinct := sorted({seed for _, seed in pairs})) > 1:
            yield f"the runs of beta index {index}, replicate {replicate} have different seeds: {distinct}"


def _differences(cell: Cell, plan: Plan, ids: Mapping[str, str]) -> Iterator[str]:
    """The values in which a cell of the grid or of the tuning stage differs from the plan."""
    if (point := cell.where) is None:
        return
    if point.beta != (beta := plan.grid.beta[point.beta_index]):
        yield f"its beta is {point.beta:g}, expected {beta:g}"
    if cell.overrides != (overrides := plan.overrides(point)):
        yield f"its overrides are {cell.overrides}, expected {overrides}"
    stages = plan.inputs(point.replicate).values()
    if {*cell.needs} != {ids.get(stage) for stage in stages}:
        yield f"it does not start from {' and '.join(stages)}"


def _not_recomputed(locked: LockedPlan) -> Iterator[tuple[Cell, str]]:
    """Cells whose seed or id is not the one that the plan gives, in the spelling of the file."""
    plan, content = locked.plan, locked.document["content"]
    written = content["plan"]
    *_, last = written["stages"]
    blocks = [*written["grid"].get("blocks", {}).values()] or [{}]
    trials = grouped((one for one in locked.cells.values() if one.trial), lambda one: one.arm)
    ids = {one.stage: one.id for one in locked.cells.values() if one.where is None}
    for record in locked.document["cells"]:
        cell = locked.cells[record["id"]]
        at, stage = cell.where, cell.stage if cell.where is None else last
        address = () if at is None else (at.beta_index, at.replicate)
        if cell.seed != (seed := cell_seed(plan.root_seed, cell.stage, *address)):
            yield cell, f"its seed is {cell.seed}, the plan gives {seed}"
        block = blocks[at.replicate % len(blocks)] if at else {}
        inputs = {**written["stages"][stage].get("inputs", {}), **block.get("inputs", {})}
        changed = {SEED: cell.seed, **record.get("overrides", {}), **({BETA: at.beta} if at else {})}
        identity = {
            "config": content.get(CONFIGS, {}).get(stage),
            "environment": {**content.get("environment", {}), "threads": plan.threads_of(cell.stage)},
        }
        sources = {key: ids.get(source, "") for key, source in inputs.items()}
        tuned_by = digest([one.id for one in trials[cell.arm]]) if plan.tuning and cell.point else ""
        hashed = any(names_input(key) for key, _ in flat(changed))  # the plan lacks what is in such a file
        if not hashed and cell.id != cell_id(identity, changed, sources, tuned_by):
            yield cell, "its id is not that of its configuration, seed and inputs"
