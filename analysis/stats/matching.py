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
    betas = sweep.plan.grid.beta
    for index in betas:
        for replicate in range(sweep.plan.grid.replicates):
            ours, theirs = grid.get((treatment, index, replicate)), grid.get((control, index, replicate))
            if ours and theirs:
                rows.append((index, replicate, ours, theirs))
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
        outcomes(schema.REWARD),
    )
