"""The matched pairs of a sweep."""

import numpy as np

from analysis.results.sweep import Sweep
from analysis.stats.pairs import FloatArray, Pairs
from lit_klrb import schema


def match(sweep: Sweep, treatment: str, control: str) -> Pairs:
    """The matched pairs of two estimators: points of the grid where both have a result.

    Pairs are swapped on their own, unless a replicate's pairs share a seed across betas (then whole
    replicates are): a seed's luck would count once for each beta.
    """
    grid, rows = sweep.grid, []
    for level in sweep.plan.betas:
        for replicate in range(sweep.plan.replicates):
            ours, theirs = grid.get((treatment, level, replicate)), grid.get((control, level, replicate))
            if ours and theirs:
                rows.append((level, replicate, ours, theirs))
    seeds = [{ours.cell.seed, theirs.cell.seed} - {None} for _, _, ours, theirs in rows]
    shared = sum(map(len, seeds)) > len(set().union(*seeds))
    replicates = np.array([row[1] for row in rows], dtype=np.int64)

    def outcomes(key: str) -> FloatArray:
        values = [(ours.outcome(key), theirs.outcome(key)) for _, _, ours, theirs in rows]
        return np.array(values, dtype=np.float64).reshape(-1, 2)

    return Pairs(
        treatment,
        control,
        np.array([sweep.plan.betas[row[0]] for row in rows], dtype=np.float64),
        np.array([row[0] for row in rows], dtype=np.int64),
        replicates,
        replicates if shared else np.arange(len(rows)),
        outcomes(schema.KL),
        outcomes(schema.REWARD),
    )
