"""The matched pairs of a sweep, with their evaluations and training curves."""

import functools
from itertools import product

import numpy as np

from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.pairs import Curves, FloatArray, Pairs
from lit_klrb import schema

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
    shared = len(seeds) < len(rows)
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
        replicates if shared else np.arange(len(rows)),
        outcomes(schema.KL),
        np.zeros((len(rows), 2)) if sweep.plan.primary.outcome == schema.KL else outcomes(schema.REWARD),
        blocks=sweep.distinct_blocks,
    )


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
