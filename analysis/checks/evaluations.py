"""Checks of the final evaluations, which results are: their prompts, errors and values, and rollouts."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from analysis.checks.traces import by_arm, grouped
from analysis.results.keys import flat
from analysis.results.locked import LockedPlan
from analysis.results.plan import Plan
from analysis.results.records import Run
from analysis.results.sweep import Problem
from lit_klrb import schema

# Largest relative difference of a standard error from that of the values per prompt, which are rounded.
_OF_ERROR = 0.01
# What an arm gains in its evaluations more than in its rollouts, beyond what the control does, as a share of
# how far rollouts move; at most .3 in published sweeps.
_FAR = 0.5
# Differences of pairs that agree to this share of their mean, as with rounding, are made, not run.
_EQUAL = 1e-3
_SETTING = "data.eval_size"
# What shows where runs start and what they gain, and the setting that prevents it.
_START, _FIRST = "an evaluation before the first step", "trainer.num_sanity_val_steps"


def suspicious_evaluations(grid: Sequence[Run], locked: LockedPlan) -> Iterator[Problem]:
    """Problems of the results of runs of the grid without diverged ones."""
    plan, imported = locked.plan, locked.origin is not None
    metrics = (schema.KL,) if plan.primary.outcome == schema.KL else (schema.REWARD, schema.KL)
    yield from _constant(grid, metrics, serious=not imported)
    yield from _equal_differences(grid, plan, metrics)
    if imported or not grid:
        return
    if not any(run.curves or run.settings or run.weights or run.rows for run in grid):
        text = "no run has curves, settings, weights or hashes of its rows: nothing can be checked"
        yield Problem(text, serious=True)
    last = plan.stages[[*plan.stages][-1]]
    settings = dict(flat({**locked.config, **last.overrides}))
    evaluated = plan.module == "lit_klrb" and settings.get(_FIRST) != 0
    yield from _not_recorded(grid, metrics, evaluated=evaluated)
    yield from _prompts(grid)
    for run, key in product(grid, metrics):
        yield from _errors(run, key)
    yield from _far_from_rollouts(grid, plan, metrics)


def _constant(grid: Sequence[Run], metrics: Sequence[str], *, serious: bool) -> Iterator[Problem]:
    """Arms of which all runs have one reward or one KL, as where it was not computed."""
    for (arm, runs), key in product(by_arm(grid), metrics):
        values = {run.outcome(key) for run in runs}
        if len(runs) > 1 and len(values) == 1:
            name = "KL" if key == schema.KL else key
            text = f"all {len(runs)} runs of {arm} have the same {name}, {values.pop():g}"
            yield Problem(f"{text}: was it computed, and is this its column?", serious=serious)


def _equal_differences(grid: Sequence[Run], plan: Plan, metrics: Sequence[str]) -> Iterator[Problem]:
    """Arms whose runs all differ by the same from those of the control that they are paired with."""
    runs = {run.cell.place: run for run in grid}
    for arm, key, index in product(plan.comparisons, metrics, plan.grid.beta):
        places = [(index, replicate) for replicate in range(plan.grid.replicates)]
        pairs = [(runs.get((arm, *one)), runs.get((plan.primary.control, *one))) for one in places]
        values = np.array([one.outcome(key) - other.outcome(key) for one, other in pairs if one and other])
        if (
            len(values) > 2
            and np.ptp(values) + abs(values[0]) > 0
            and np.ptp(values) <= _EQUAL * abs(values[0])
        ):
            beta, name = plan.grid.beta[index], "KL" if key == schema.KL else key
            text = f"the {name} of {arm} less that of {plan.primary.control} is {values[0]:.3g} in all"
            yield Problem(f"{text} {len(values)} pairs at β = {beta:g}, which runs do not show", serious=True)


def _not_recorded(grid: Sequence[Run], metrics: Sequence[str], *, evaluated: bool) -> Iterator[Problem]:
    """Arms some of whose runs lack what others have, or every run has, and what they could be checked by.

    Args:
        grid: The runs.
        metrics: What is evaluated.
        evaluated: Whether every run is evaluated before its first step, where it starts.
    """
    records: dict[str, Callable[[Run], object]] = {
        "the hash of their weights": lambda run: run.weights,
        "versions": lambda run: run.versions,
        "curves of training": lambda run: any(key.startswith("train/") for key in run.curves),
        _START: lambda run: all(run.first(key) is not None for key in metrics),
    }
    for what, of in records.items():
        lacking = Counter(run.point.arm for run in grid if not of(run))
        everywhere = evaluated and what == _START
        if lacking and (everywhere or lacking.total() < len(grid)):
            names = ", ".join(f"{count} of {arm}" for arm, count in sorted(lacking.items()))
            others = f"every run has, unless {_FIRST} is 0" if everywhere else "others have"
            yield Problem(f"runs without {what}, which {others}: {names}", serious=True)


def _prompts(grid: Sequence[Run]) -> Iterator[Problem]:
    """Values of fewer prompts than were evaluated, or of other numbers of them."""
    counts = {
        label: sorted({len(run.prompts.get(schema.KL, ())) for run in each}) for label, each in by_arm(grid)
    }
    if len({count for each in counts.values() for count in each}) > 1:
        listing = "; ".join(f"{arm} {', '.join(map(str, each))}" for arm, each in counts.items())
        yield Problem(f"the runs have values of different numbers of prompts: {listing}", serious=True)
    for run in grid:
        evaluated = run.evaluation_prompts or int(run.settings.get(_SETTING, 0))
        count = len(run.prompts.get(schema.KL, ()))
        # Those that record the number of prompts record their values
        if (count or run.evaluation_prompts) and evaluated and count != evaluated:
            text = f"{run.file}: has values of {count} prompts, but {evaluated} were evaluated"
            yield Problem(text, serious=True, kind="other prompts than evaluated")


def _errors(run: Run, key: str) -> Iterator[Problem]:
    """A standard error that is not the one of the values per prompt."""
    error, recorded = run.standard_error(key), run.outcome(f"{key}_se")
    if not np.isfinite([error, recorded]).all():
        return
    rounding = 1e-3 * float(np.abs(run.prompts[key]).max()) / len(run.prompts[key]) ** 0.5
    if abs(recorded - error) > _OF_ERROR * error + rounding:
        text = f"{run.file}: the standard error of its {key} is {recorded:g}, but its prompts give {error:g}"
        yield Problem(text, serious=True, kind=f"another error of the {key}")


def _far_from_rollouts(grid: Sequence[Run], plan: Plan, metrics: Sequence[str]) -> Iterator[Problem]:
    """Arms that gain more in their evaluations than in their rollouts, beyond what the control does."""
    control = plan.primary.control
    for index, key in product(plan.grid.beta, metrics):
        runs = [run for run in grid if run.point.beta_index == index]
        arms = grouped(runs, lambda run: run.point.arm)
        rises = {
            arm: [one for run in of_arm if (one := _beyond(run, key)) is not None]
            for arm, of_arm in arms.items()
        }
        for arm in plan.comparisons:
            if min(len(rises.get(arm, [])), len(rises.get(control, []))) < 2:
                continue
            (more, moves), (usual, usually) = (np.mean(rises[name], axis=0) for name in (arm, control))
            if abs(more - usual) > _FAR * max(moves, usually) > 0:
                yield Problem(
                    f"at β = {plan.grid.beta[index]:g} the {key} of {arm} rises in its evaluations by "
                    f"{more - usual:.3g} more than in its rollouts, which move by {max(moves, usually):.3g}, "
                    f"compared with that of {control}",
                    serious=True,
                )


def _beyond(run: Run, key: str) -> tuple[float, float] | None:
    """What a metric rises between evaluations more than between rollouts, and how far rollouts move.

    None without both curves. The last rollouts are the last quarter.
    """
    train, val = (run.curves.get(f"{source}/{key}") for source in ("train", "val"))
    first = run.first(key)
    if train is None or val is None or first is None or len(train.value) < 4:
        return None
    tail = float(train.value[-max(2, len(train.value) // 4) :].mean())
    return float(val.value[-1]) - first - (tail - float(train.value[0])), float(np.ptp(train.value))
