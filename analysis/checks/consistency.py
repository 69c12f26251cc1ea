"""A sweep with the problems that all checks find: other cells, impossible values, units and lengths."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from analysis.checks.settings import other_settings
from analysis.checks.traces import by_arm, grouped, listed, suspicious_traces
from analysis.design.rates import at_the_edge, choice_of
from analysis.results import layout
from analysis.results.locked import LockedPlan, Origin
from analysis.results.plan import Plan
from analysis.results.records import Cell, Run
from analysis.results.sweep import Problem, Sweep, read_sweep
from lit_klrb import schema

# The common evaluator's KL is an average of exact KLs of tokens: what is below 0 is rounding.
_ROUNDING = 1e-3
# Larger ratios of two arms' KLs or rewards are those of other units, unless an import states the unit.
_KL_RATIO, _REWARD_RATIO = 8.0, 2.5
# Settings whose product is the number of optimizer steps of a rollout.
_PER_ROLLOUT = ("model.inner_epochs", "model.mini_batches")
# What no log shows, and a mapping states by these lines.
UNSTATED = {
    "reward_unit: task": "all rewards are of one function, scale and sign, and none contains the penalty",
    "kl_unit: sequence": "all KLs are KL(policy \u2016 reference), summed over a completion",
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
        for key, (own, other) in arm.evaluation.items():
            text = f"{label} was evaluated with {key} = {own}, {control} with {other}"
            yield Problem(text, serious=True)


def unstated(locked: LockedPlan) -> list[str]:
    """One line on what no log shows and the mapping of an import does not state; empty if it states all."""
    if (origin := locked.origin) is None:
        return []
    rewards = origin.reward_unit is not None or locked.plan.primary.outcome == schema.KL
    known = (rewards, origin.kl_unit is not None)
    lines = (f"`{line}` ({what})" for line, what in UNSTATED.items())
    missing = [line for line, stated in zip(lines, known, strict=True) if not stated]
    return [f"no log shows, and the mapping does not state: {'; '.join(missing)}"] if missing else []


def _alien_cells(locked: LockedPlan) -> Iterator[str]:
    """One line on cells that the plan does not give, and on each pair with several seeds."""
    plan, cells = locked.plan, locked.cells.values()
    grid = [cell.place for cell in cells if cell.place is not None]
    trials = [cell.trial for cell in cells if cell.trial is not None]
    if sorted(grid) != sorted(plan.places) or sorted(trials) != sorted(plan.trials):
        yield f"{layout.PLAN}: its cells are not those of its grid"
        return
    ids = {cell.stage: cell.id for cell in cells if cell.arm is None}
    alien = ((cell, what) for cell in cells for what in _differences(cell, plan, ids))
    yield from (f"{layout.PLAN}: {cell}: {what}" for cell, what in [*alien][:1])
    seeds = grouped(((cell.place[1:], cell.seed) for cell in cells if cell.place), lambda pair: pair[0])
    for (index, replicate), pairs in seeds.items():
        if len(own := sorted({seed for _, seed in pairs})) > 1:
            yield f"the runs of beta index {index}, replicate {replicate} have different seeds: {own}"


def _differences(cell: Cell, plan: Plan, ids: Mapping[str, str]) -> Iterator[str]:
    """What a cell of the grid or of the tuning stage does not have as the plan gives it."""
    if (point := cell.where) is None:
        return
    if point.beta != (beta := plan.grid.beta[point.beta_index]):
        yield f"its beta is {point.beta:g}, expected {beta:g}"
    if cell.overrides != (overrides := plan.overrides(point)):
        yield f"its overrides are {cell.overrides}, expected {overrides}"
    stages = plan.inputs(point.replicate).values()
    if {*cell.needs} != {ids.get(stage) for stage in stages}:
        yield f"it does not start from {' and '.join(stages)}"


def inconsistencies(sweep: Sweep) -> Iterator[Problem]:
    """Problems of the runs of a sweep, of the choice of rates, and of what is lost."""
    plan, origin = sweep.plan, sweep.locked.origin
    arms = [run for run in sweep.runs if run.cell.arm is not None]
    grid = [run for run in arms if run.cell.point is not None and not run.diverged]
    yield from suspicious_traces(arms, plan)
    yield from other_settings(arms, sweep.locked)
    yield from _negative(grid, imported=origin is not None)
    if origin is not None:
        yield from _units(grid, plan, origin)
        yield from _constant(grid, plan)
    for block in grouped(grid, lambda run: plan.grid.block_of(run.point.replicate)).values():
        yield from _unlike(block, "end at different steps", _last_step, _rollouts)
    yield from _unlike(grid, "were made with different versions", _versions)
    yield from _processors(grid)
    yield from _choice_problems(sweep)
    lost = Counter(failure.cell.point.arm for failure in sweep.failures if failure.cell.point is not None)
    if lost:
        counts = ", ".join(f"{label} {lost[label]}" for label in plan.grid.arms)
        why = "sound only if the reason has nothing to do with how well they trained"
        yield Problem(f"runs without a result: {counts}; their pairs are left out, which is {why}")


def _choice_problems(sweep: Sweep) -> Iterator[Problem]:
    """Problems of the locked choice of rates: none, not that of the runs, or at the edge."""
    choice = sweep.locked.choice
    if choice is None:
        if sweep.plan.tuning and sweep.grid:
            text = f"{layout.PLAN}: has no choice of rates, though runs of the grid exist"
            yield Problem(text, serious=True)
        return
    if choice != choice_of(sweep.plan, sweep.runs):
        text = f"{layout.PLAN}: its choice of rates is not that of the results of the tuning stage"
        yield Problem(text, serious=True)
    yield from map(Problem, at_the_edge(sweep.plan, choice.rates))


def _negative(grid: Sequence[Run], *, imported: bool) -> Iterator[Problem]:
    """Negative KLs of runs, and of arms: an estimate can be negative for a run, but not on average."""
    for run in grid:
        kl = run.outcome(schema.KL)
        if kl < -_ROUNDING:
            text = f"{run.file}: its KL is {kl:g}; a KL is not negative"
            yield Problem(text, serious=not imported, kind="a negative KL")
    arms = grouped(grid, lambda run: (run.point.arm, run.point.beta_index)) if imported else {}
    for (label, index), runs in arms.items():
        if (mean := fmean(run.outcome(schema.KL) for run in runs)) < -_ROUNDING:
            yield Problem(f"the mean KL of {label} at beta index {index} is {mean:g}", serious=True)


def _units(grid: Sequence[Run], plan: Plan, origin: Origin) -> Iterator[Problem]:
    """Arms whose logged rewards or KLs differ as those in different units do, unless their unit is stated."""
    reward, kl = UNSTATED.items()
    asked = [
        (schema.REWARD, "reward", _REWARD_RATIO, "another scale or sign, or a penalty within?", reward),
        (schema.KL, "KL", _KL_RATIO, "per completion beside per token?", kl),
    ]
    stated = {schema.REWARD: origin.reward_unit, schema.KL: origin.kl_unit}
    for key, name, most, why, (line, what) in asked:
        for index, beta in plan.grid.beta.items() if stated[key] is None else ():
            arms = grouped((run for run in grid if run.point.beta_index == index), lambda run: run.point.arm)
            values = {arm: [run.outcome(key) for run in runs] for arm, runs in arms.items()}
            ratio, high, low = _furthest(values)
            if ratio > most or (ratio < 0 and key == schema.REWARD):
                text = f"at beta {beta:g} the {name} of {high} is {ratio:.2g} times that of {low}: {why}"
                yield Problem(f"{text} `{line}` in the mapping states that {what}", serious=True)


def _constant(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Arms of which all runs have one reward or one KL, as where it was not computed."""
    names = {schema.KL: "KL"} | ({} if plan.primary.outcome == schema.KL else {schema.REWARD: "reward"})
    for arm, runs in grouped(grid, lambda run: run.point.arm).items():
        for key, name in names.items():
            values = {run.outcome(key) for run in runs}
            if len(runs) > 1 and len(values) == 1:
                text = f"all {len(runs)} runs of {arm} have the same {name}, {values.pop():g}"
                yield Problem(f"{text}: was it computed, and is this its column?")


def _furthest(values: Mapping[str, Sequence[float]]) -> tuple[float, str, str]:
    """The ratio of the two means that differ most, below 0 for different signs, with the arms they are of.

    It is 1 if runs of the two arms overlap, or the smaller mean is 0.
    """
    means = {arm: fmean(own) for arm, own in values.items()}
    if len(means) < 2:
        return 1.0, "", ""
    least, most = (choose(means, key=lambda arm: means[arm]) for choose in (min, max))
    high, low = (choose(means, key=lambda arm: abs(means[arm])) for choose in (max, min))
    if means[least] < 0 < means[most]:
        high, low = most, least
    overlap = min(values[high]) <= max(values[low]) and max(values[high]) >= min(values[low])
    return (1.0 if overlap or not means[low] else means[high] / means[low]), high, low


def _unlike(
    grid: Sequence[Run], what: str, of: Callable[[Run], str], compared: Callable[[Run], str] | None = None
) -> Iterator[Problem]:
    """A property in which runs should agree; there is no verdict where `compared` differs, too."""
    values = {label: sorted(set(map(of, runs))) for label, runs in by_arm(grid)}
    if len({value for own in values.values() for value in own if value}) > 1:
        serious = compared is not None and len({value for run in grid if (value := compared(run))}) > 1
        yield Problem(f"the runs {what}: {listed(values)}", serious=serious)


def _last_step(run: Run) -> str:
    curves = [curve for key, curve in run.curves.items() if key.startswith("train/")]
    steps = [curve.step[-1] for curve in curves if len(curve.step)]
    return f"{max(steps):g}" if steps else ""


def _rollouts(run: Run) -> str:
    """The number of rollouts after the last step, of which an arm may make several optimizer steps."""
    last, steps = _last_step(run), math.prod(int(run.settings.get(key, 1)) for key in _PER_ROLLOUT)
    return f"{(float(last) + 1) / steps:g}" if last else ""


def _versions(run: Run) -> str:
    return " ".join(
        f"{name} {version}" for name, version in sorted(run.versions.items()) if name != schema.PROCESSOR
    )


def _processors(grid: Sequence[Run]) -> Iterator[Problem]:
    """How many groups of matched runs were trained on several kinds of processors."""
    groups = grouped(grid, lambda run: (run.point.beta_index, run.point.replicate)).values()
    kinds = [
        {run.versions[schema.PROCESSOR] for run in runs if schema.PROCESSOR in run.versions}
        for runs in groups
    ]
    if several := sum(len(own) > 1 for own in kinds):
        yield Problem(
            f"{several} of {len(kinds)} groups of matched runs were trained on several kinds of processors "
            f"({', '.join(sorted(set().union(*kinds)))}), on which runs of one seed differ in the last digits"
        )


# Number of missing runs that are named.
_NAMED = 10


def load_sweep(directory: Path) -> Sweep:
    """Read and check a sweep. Files that fail a check are skipped and listed in `problems`.

    Raises:
        ConfigurationError: If it has no plan or no results, or results in both forms.
        DamagedFileError: If its plan cannot be read.
    """
    sweep = read_sweep(directory)
    every = [*plan_problems(sweep.locked), *sweep.problems, *inconsistencies(sweep)]
    sweep = replace(sweep, problems=every)
    if (origin := sweep.locked.origin) is not None and sweep.missing:
        sweep = _without_incomplete(sweep, leave_out=origin.incomplete != "withhold")
    return replace(sweep, problems=_counted(sweep.problems))


def _without_incomplete(sweep: Sweep, *, leave_out: bool) -> Sweep:
    """An import with a problem that names missing runs, and without their replicates if asked for."""
    missing = sweep.missing
    lost = {point[1:] for point in missing}
    out = [run for run in sweep.runs if run.cell.place is not None and run.cell.place[1:] in lost]
    names = [sweep.plan.title(point) for point in missing[:_NAMED]]
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


def _counted(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, of each kind the first with their number."""

    def kind(numbered: tuple[int, Problem]) -> object:
        number, problem = numbered
        return (problem.kind, problem.serious, problem.unread) if problem.kind else number

    groups = grouped(enumerate(problems), kind).values()
    return [
        replace(first, text=f"{first.text}; and {len(others)} more") if others else first
        for (_, first), *others in groups
    ]
