"""A sweep with the problems that all checks find: other cells, impossible values, units and lengths."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from analysis.checks.evaluations import suspicious_evaluations
from analysis.checks.plans import UNSTATED, plan_problems
from analysis.checks.settings import other_settings
from analysis.checks.traces import by_arm, grouped, listed, suspicious_traces
from analysis.design.rates import at_the_edge, choice_of
from analysis.results import layout
from analysis.results.locked import Origin
from analysis.results.plan import Plan
from analysis.results.records import Run
from analysis.results.sweep import Problem, Sweep, read_sweep
from lit_klrb import schema

# The common evaluator's KL is an average of exact KLs of tokens: what is below 0 is rounding.
_ROUNDING = 1e-3
# Larger ratios of two arms' KLs or rewards are those of other units, unless an import states the unit.
_KL_RATIO, _REWARD_RATIO = 8.0, 2.5
# Ends of the keys of blocks that name where runs start.
_START = ("policy_path", "policy_layers")
# Settings whose product is the number of optimizer steps of a rollout.
_PER_ROLLOUT = ("model.inner_epochs", "model.mini_batches")


def inconsistencies(sweep: Sweep) -> Iterator[Problem]:
    """Problems of the runs of a sweep, of the choice of rates, and of what is lost."""
    plan, origin = sweep.plan, sweep.locked.origin
    arms = [run for run in sweep.runs if run.cell.arm is not None]
    grid = [run for run in arms if run.cell.point is not None and not run.diverged]
    yield from suspicious_traces(arms, plan)
    yield from suspicious_evaluations(grid, sweep.locked)
    yield from other_settings(arms, sweep.locked)
    yield from _negative(grid, imported=origin is not None)
    if origin is not None:
        yield from _units(grid, plan, origin)
    yield from _same_starts(sweep)
    for block in grouped(grid, lambda run: plan.grid.block_of(run.point.replicate)).values():
        yield from _unlike(block, "end at different steps", _last_step, _rollouts)
    yield from _unlike(grid, "were made with different versions", _versions)
    yield from _apart(grid, plan)
    yield from _processors(grid)
    yield from _choice_problems(sweep)
    lost = Counter(failure.cell.point.arm for failure in sweep.failures if failure.cell.point is not None)
    if lost:
        counts = ", ".join(f"{label} {lost[label]}" for label in plan.grid.arms)
        why = "sound only if the reason has nothing to do with how well they trained"
        yield Problem(f"runs without a result: {counts}; their pairs are left out, which is {why}")


def _same_starts(sweep: Sweep) -> Iterator[Problem]:
    """Blocks whose runs start from the same weights: by their hash, their path, or their first evaluation."""
    grid, weights = sweep.plan.grid, {run.cell.stage: run.weights for run in sweep.landmarks if run.weights}
    shown: dict[str, list[str]] = {}
    for index, (label, block) in enumerate(grid.blocks.items()):
        starts = {key: value for key, value in block.overrides.items() if key.endswith(_START)}
        others = {key: weights.get(stage, stage) for key, stage in block.inputs.items()}
        paths = {key: os.path.normpath(value) for key, value in starts.items() if isinstance(value, str)}
        keys = [str({**block.overrides, **paths, **others})]
        firsts = {
            (run.first(schema.REWARD), run.first(schema.KL))
            for run in sweep.grid.values()
            if run.point.replicate % len(grid.blocks) == index
        }
        # An evaluation before the first step is one of the start alone, if blocks differ in nothing else
        if len(starts) + len(others) == len(block.overrides) + len(block.inputs) and len(firsts) == 1:
            keys += [str(first) for first in firsts if None not in first]
        for key in keys:
            shown.setdefault(key, []).append(label)
    for labels in dict.fromkeys(map(tuple, shown.values())):
        if len(labels) > 1:
            yield Problem(
                f"the blocks {', '.join(labels)} start from the same weights: they are one", serious=True
            )


def _apart(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Arms none of whose runs has the versions, or the processor, of a run of the control."""
    arms = dict(by_arm(grid))
    control = arms.get(plan.primary.control, [])
    for what, of in (("with other versions", _versions), ("on another kind of processor", _processor)):
        usual = {of(run) for run in control} - {""}
        for arm in plan.comparisons:
            values = {of(run) for run in arms.get(arm, [])} - {""}
            if usual and values and not usual & values:
                names = f"{', '.join(sorted(values))}; {plan.primary.control} {', '.join(sorted(usual))}"
                text = f"all runs of {arm} were made {what} than those of the control"
                yield Problem(f"{text}: {names}", serious=True)


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


def _furthest(values: Mapping[str, Sequence[float]]) -> tuple[float, str, str]:
    """The ratio of the two means that differ most, below 0 for different signs, with the arms they are of.

    It is 1 if runs of the two arms overlap, or the smaller mean is 0.
    """
    means = {arm: fmean(each) for arm, each in values.items()}
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
    if len({value for of_arm in values.values() for value in of_arm if value}) > 1:
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


def _processor(run: Run) -> str:
    return run.versions.get(schema.PROCESSOR, "")


def _processors(grid: Sequence[Run]) -> Iterator[Problem]:
    """How many groups of matched runs were trained on several kinds of processors."""
    groups = grouped(grid, lambda run: (run.point.beta_index, run.point.replicate)).values()
    kinds = [{_processor(run) for run in runs} - {""} for runs in groups]
    if several := sum(len(group) > 1 for group in kinds):
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
    """The first problem of each kind, with the number of them."""

    def kind(numbered: tuple[int, Problem]) -> object:
        number, problem = numbered
        return (problem.kind, problem.serious, problem.unread) if problem.kind else number

    groups = grouped(enumerate(problems), kind).values()
    return [
        replace(first, text=f"{first.text}; and {len(others)} more") if others else first
        for (_, first), *others in groups
    ]
