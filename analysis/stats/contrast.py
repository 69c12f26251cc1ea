"""Differences between matched runs in one outcome."""

from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, clustered_mean, stratified_mean
from analysis.stats.pairs import FloatArray, Pairs


@dataclass(frozen=True, eq=False)
class Contrast:
    """Differences treatment - control of one outcome, with the weights of their mean.

    Attributes:
        values: Difference of each pair, shape [P].
        weights: Weight of each pair in the mean, shape [P].
        unit: Unit of `values`.
        ranked: Whether values depend on the order of runs alone: ranks within each beta, if a run diverged,
            and shares and counts of the frontier.
    """

    values: FloatArray
    weights: FloatArray
    unit: str
    ranked: bool

    @property
    def contributions(self) -> FloatArray:
        """The contribution of each pair to the statistic of the swap test, shape [P]."""
        return self.values * self.weights


def equal_betas(pairs: Pairs) -> FloatArray:
    """Weights that make the mean over pairs the unweighted mean of the betas' means, shape [P].

    With weights by inverse variance, a beta at which nearly nothing changes would dominate the mean.
    """
    _, place, counts = np.unique(pairs.beta_index, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(counts) * counts[place]))


def over_blocks(contrast: Contrast, pairs: Pairs) -> bool:
    """Whether the mean of a contrast is tested over blocks.

    Not that of ranks and counts, which can be the same in all of a few blocks: a t test would give p = 0.
    """
    return pairs.over_blocks and not contrast.ranked


def mean_of(contrast: Contrast, pairs: Pairs) -> Estimate:
    """The weighted mean of a contrast.

    Over blocks it is the mean of the blocks' means, whose spread gives the standard error. Otherwise the
    error is that of pairs within blocks, or of replicates if these share seeds over beta.
    """
    if over_blocks(contrast, pairs):
        return Estimate.of_mean(np.array([each.value for each in block_means(contrast, pairs).values()]))
    if pairs.seeds_shared:
        return clustered_mean(contrast.values, contrast.weights, pairs.replicate)
    strata = pairs.beta_index * max(1, len(pairs.blocks)) + pairs.block
    return stratified_mean(contrast.values, contrast.weights, strata)


def block_means(contrast: Contrast, pairs: Pairs) -> dict[int, Estimate]:
    """The mean of each block, each beta counting the same, with an error from the block's own pairs."""
    found = {}
    for block in np.unique(pairs.block):
        rows = pairs.block == block
        own = replace(pairs.subset(rows), blocks=())
        part = replace(contrast, values=contrast.values[rows], weights=equal_betas(own))
        found[int(block)] = mean_of(part, own)
    return found


def difference(pairs: Pairs, values: FloatArray, unit: str, *, lower_is_better: bool = False) -> Contrast:
    """The difference in an outcome [P, 2]: the unweighted mean over betas; by rank if a run diverged."""
    if pairs.diverged.any():
        return ranked(pairs, values, lower_is_better=lower_is_better)
    return Contrast(values[:, 0] - values[:, 1], equal_betas(pairs), unit, ranked=False)


def ranked(pairs: Pairs, values: FloatArray, *, lower_is_better: bool = False) -> Contrast:
    """Ranks within each beta, scaled to (0, 1); diverged runs share the worst rank."""
    sign = -1.0 if lower_is_better else 1.0
    filled = np.where(pairs.diverged, -np.inf, sign * values)
    ranks = np.zeros_like(filled)
    for index in pairs.beta_indices:
        rows = pairs.beta_index == index
        ranks[rows] = (stats.rankdata(filled[rows], axis=None).reshape(-1, 2) - 0.5) / (2 * rows.sum())
    differences = sign * (ranks[:, 0] - ranks[:, 1])
    return Contrast(differences, equal_betas(pairs), "rank among the runs of its beta (0 to 1)", True)
