"""The arrays of a sweep: its matched pairs, their evaluations and curves, outcomes of arms, chosen rates."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from analysis.design.rates import edge_of, trial_outcomes
from analysis.results.records import OBJECTIVE, Cell, Run
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import Curves, FloatArray, Pairs
from analysis.stats.tuning import Tuned, resampled
from lit_klrb import schema

# The settings that determine the weights from which a run starts.
_STARTS = ("model.policy_path", "model.policy_layers")
# Number of bootstrap samples of the chosen rates.
SAMPLES = 2_000
# Smallest number of replicates whose spread is compared.
_FEWEST = 3


def match(sweep: Sweep, treatment: str, control: str) -> Pairs:
    """The matched pairs of two arms: points of the grid at which both have a result.

    Each pair is a swap unit, unless the pairs of a replicate share a seed across betas: then whole replicates
    are swapped, as their pairs are not independent. If the plan decides by the KL, all rewards are set to 0.
    """
    grid, betas = sweep.grid, sweep.plan.grid.beta
    rows = [
        (index, replicate, ours, theirs)
        for index, replicate in product(betas, range(sweep.plan.grid.replicates))
        if (ours := grid.get((treatment, index, replicate)))
        and (theirs := grid.get((control, index, replicate)))
    ]
    seeds = {ours.cell.seed for _, _, ours, _ in rows}
    replicates = np.array([row[1] for row in rows], dtype=np.int64)

    def outcomes(key: str) -> FloatArray:
        values = [(ours.outcome(key), theirs.outcome(key)) for _, _, ours, theirs in rows]
        return np.array(values, dtype=np.float64).reshape(-1, 2)

    return Pairs(
        treatment,
        control,
        np.array([betas[row[0]] for row in rows], dtype=np.float64),
        np.array([row[0] for row in rows], dtype=np.int64),
        replicates,
        replicates if len(seeds) < len(rows) else np.arange(len(rows)),
        outcomes(schema.KL),
        np.zeros((len(rows), 2)) if sweep.plan.primary.outcome == schema.KL else outcomes(schema.REWARD),
        blocks=distinct_blocks(sweep),
    )


def warm_starts(sweep: Sweep) -> int:
    """Number of different weights from which the runs of the grid started."""
    weights = _weights(sweep)

    def start(cell: Cell) -> tuple[object, ...]:
        """As far as they are those of checkpoints or settings."""
        places = (value for key, value in cell.overrides.items() if key in _STARTS)
        return (*(weights.get(need, need) for need in cell.needs), *(str(_spelled(one)) for one in places))

    return len({start(run.cell) for run in sweep.grid.values()})


def distinct_blocks(sweep: Sweep) -> tuple[int, ...]:
    """For each block of the plan, the position of the first one that is the same.

    The same are blocks whose values agree, whatever the spelling of a path, and whose checkpoints have the
    same weights.
    """
    ids, weights = {run.cell.stage: run.cell.id for run in sweep.landmarks}, _weights(sweep)
    kinds = []
    for block in sweep.plan.grid.blocks.values():
        cells = {key: ids.get(stage, stage) for key, stage in block.inputs.items()}
        values = {**block.overrides, **{key: weights.get(cell, cell) for key, cell in cells.items()}}
        kinds.append({key: _spelled(value) for key, value in values.items()})
    return tuple(map(kinds.index, kinds))


def _weights(sweep: Sweep) -> dict[str, str]:
    """Id of a cell of a shared stage -> the hash of the weights that it ended with, where it is known."""
    return {run.cell.id: run.weights for run in sweep.landmarks if run.weights}


def _spelled(value: object) -> object:
    """A value, a path in one of its spellings."""
    return os.path.normpath(value) if isinstance(value, str) else value


def matched_evaluations(sweep: Sweep, pairs: Pairs) -> dict[int, FloatArray]:
    """Differences of matched runs in what decides, per prompt of the common evaluation.

    Returns:
        Index of beta -> treatment - control in J, or in the KL where the plan decides by it, of S pairs
        without a diverged run on P prompts, shape [S, P]. Empty if a run has no values per prompt, or another
        number of prompts.
    """
    grid, found = sweep.grid, {}
    usable = pairs.subset(np.asarray(~pairs.diverged.any(axis=1)))
    for index in map(int, usable.beta_indices):
        replicates = usable.replicate[usable.beta_index == index]
        runs = [[grid[name, index, int(s)] for s in replicates] for name in (pairs.treatment, pairs.control)]
        ours, theirs = ([_prompt_values(sweep, run) for run in column] for column in runs)
        if len({len(values) for values in (*ours, *theirs)}) > 1:
            return {}
        found[index] = np.array(ours) - np.array(theirs)
    prompts = {values.shape[1] for values in found.values()}
    return found if len(prompts) == 1 and prompts != {0} else {}


def _prompt_values(sweep: Sweep, run: Run) -> FloatArray:
    """J of each prompt, or its KL where the plan decides by it, shape [P]; shape [0] if unknown."""
    kl, reward = (run.prompts.get(key, np.zeros(0)) for key in (schema.KL, schema.REWARD))
    return kl if sweep.plan.primary.outcome == schema.KL else reward - run.point.beta * kl


def matched_curves(sweep: Sweep, pairs: Pairs, metric: str) -> Curves | None:
    """Training curves of a metric at the steps common to all pairs without a diverged run.

    Args:
        sweep: The sweep.
        pairs: Matched pairs of the sweep.
        metric: The reward, or the KL, whose log is taken: the spread of a KL increases with its level.

    Returns:
        The curves; None with fewer than two steps at which the metric varies, or with fewer than three
        replicates, as deviations of two values from their median have equal size.
    """
    pairs = pairs.subset(np.asarray(~pairs.diverged.any(axis=1)))
    if pairs.replicates < _FEWEST:
        return None
    common = _at_common_steps(sweep, pairs, f"train/{metric}")
    if common is None:
        return None
    steps, values = common
    allowed = np.isfinite(values).all(axis=(0, 1))
    if metric == schema.KL:
        allowed &= (values > 0).all(axis=(0, 1))
        values = np.log(np.where(allowed, values, 1.0))
    ranges = [np.ptp(values[pairs.beta_index == index], axis=0) for index in pairs.beta_indices]
    allowed &= np.any(ranges, axis=(0, 1))
    values, steps = values[..., allowed], steps[allowed]
    return Curves(metric, pairs, steps, values) if len(steps) >= 2 else None


def _at_common_steps(sweep: Sweep, pairs: Pairs, key: str) -> tuple[FloatArray, FloatArray] | None:
    """The steps [T] at which all runs have a metric, and its values [P, 2, T]; None if a run lacks it."""
    grid = sweep.grid
    found = [
        grid[name, int(index), int(replicate)].curves.get(key)
        for index, replicate in zip(pairs.beta_index, pairs.replicate, strict=True)
        for name in (pairs.treatment, pairs.control)
    ]
    curves = [curve for curve in found if curve is not None and len(curve.step)]
    if not curves or len(curves) < len(found):
        return None
    steps = functools.reduce(np.intersect1d, [curve.step for curve in curves])
    values = np.array([curve.value[np.searchsorted(curve.step, steps)] for curve in curves])
    return steps, values.reshape(len(pairs), 2, len(steps))


@dataclass(frozen=True)
class ArmOutcome:
    """One arm at one beta."""

    label: str  # the arm
    beta: float  # the weight of the KL
    n: int  # runs that did not diverge
    diverged: int  # runs that diverged
    # Mean over replicates of "reward", "kl", "objective" and "length", with its standard error
    means: dict[str, Estimate]
    # Mean matched difference to the control, by the same keys; empty for the control itself
    differences: dict[str, Estimate]
    higher: dict[str, int]  # number of matched pairs in which the arm has the higher value, by the same keys
    pairs: int  # matched pairs without a diverged run


def arm_outcomes(sweep: Sweep, keys: Sequence[str]) -> list[ArmOutcome]:
    """Every arm at every beta, in plan order, with some outcomes, such as those of `compared`."""
    grid, plan, found = sweep.grid, sweep.plan, []
    control = plan.primary.control
    for label, (index, beta) in product(plan.grid.arms, plan.grid.beta.items()):
        mine = [run for r in range(plan.grid.replicates) if (run := grid.get((label, index, r)))]
        runs = [run for run in mine if not run.diverged]
        values = {key: _values(runs, key) for key in keys}
        # With the control's runs, where neither of the pair diverged
        theirs = [grid.get((control, index, run.point.replicate)) for run in runs if label != control]
        pairs = [
            (run, other) for run, other in zip(runs, theirs, strict=False) if other and not other.diverged
        ]
        differences = {
            key: _values([ours for ours, _ in pairs], key) - _values([other for _, other in pairs], key)
            for key in (keys if label != control else ())
        }
        # A rounding error, relative to the values, is no positive difference
        least = {key: 2.0**-32 * np.abs(value).max(initial=0.0) for key, value in values.items()}
        found.append(
            ArmOutcome(
                label,
                beta,
                len(runs),
                len(mine) - len(runs),
                {key: Estimate.of_mean(value) for key, value in values.items()},
                {key: Estimate.of_mean(value) for key, value in differences.items()},
                {key: int((value > least[key]).sum()) for key, value in differences.items()},
                len(pairs),
            )
        )
    return found


def _values(runs: Sequence[Run], key: str) -> FloatArray:
    return np.array([run.outcome(key) for run in runs], dtype=np.float64)


def compared(sweep: Sweep) -> tuple[str, ...]:
    """The keys of the described outcomes; without reward and J if the plan decides by the KL.

    The length of completions is one of them, if all runs have it: a low KL may be that of completions that
    end at once.
    """
    alone = sweep.plan.primary.outcome == schema.KL
    outcomes = (schema.KL,) if alone else (schema.REWARD, schema.KL, OBJECTIVE)
    lengths = [run.outcome(schema.LENGTH) for run in sweep.grid.values() if not run.diverged]
    return (*outcomes, schema.LENGTH) if lengths and np.isfinite(lengths).all() else outcomes


def start_of(sweep: Sweep) -> dict[str, float | None]:
    """Reward, KL and length at the start of the runs of the grid.

    From the runs' evaluation before the first step, which is the same for all runs of a block; if there is
    none, from the final evaluation of the last stage that they start from. With blocks, their mean.
    """
    found: dict[str, float | None] = {}
    stages = list(sweep.plan.stages)
    before = sorted(
        (run for run in sweep.landmarks if np.isfinite(run.outcome(schema.KL))),
        key=lambda run: stages.index(run.cell.stage),
    )
    starts = {run.cell.needs for run in sweep.grid.values()}
    latest = [own[-1] for needs in starts if (own := [run for run in before if run.cell.id in needs])]
    for key in (schema.REWARD, schema.KL, schema.LENGTH):
        first = [value for run in sweep.grid.values() if (value := run.first(key)) is not None]
        last = np.mean([run.outcome(key) for run in latest]) if latest else np.nan
        found[key] = float(np.mean(first)) if first else float(last) if np.isfinite(last) else None
    return found


def tuned_arms(sweep: Sweep, *, ratio: bool = False) -> dict[str, Tuned]:
    """What is known of each arm's rate; empty without a choice.

    All arms share the resampled replicates, as their runs share seeds.

    Args:
        sweep: The sweep.
        ratio: Whether regrets are those of the logarithm of a KL, where it decides, instead of the KL.
    """
    if sweep.plan.tuning is None or not sweep.locked.rates:
        return {}
    rates = sorted(sweep.plan.tuning.rates)
    outcomes = trial_outcomes(sweep.plan, sweep.trials)
    count = sweep.plan.tuning.replicates
    drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
    found = {}
    for arm, rate in sweep.locked.rates.items():
        if rate not in rates or not np.isfinite(outcomes[arm]).any():
            continue
        edge, chosen = edge_of(rates, rate), rates.index(rate)
        logs = sweep.plan.primary.outcome == schema.KL
        values = outcomes[arm]
        if logs:  # negative logarithms of KLs, from negative KLs
            values = -np.log(np.where(values < 0, -values, np.nan))
        kept, best, own = resampled(values, np.log(rates), chosen, drawn)
        lost = np.exp(-own) - np.exp(-best) if logs and not ratio else best - own
        usable = np.isfinite(outcomes[arm]).all(axis=0)
        left_out = tuple(rates[index] for index in np.flatnonzero(usable & ~kept))
        found[arm] = Tuned(rate, edge, left_out, np.zeros_like(lost) if edge else np.maximum(0.0, lost))
    return found
