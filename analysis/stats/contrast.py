"""Differences between matched runs in one outcome, in J = reward - beta * KL, in the KL or in the reward.

Replicates of one warm start say nothing about others. With blocks, such as several warm starts, the unit of a
statement about others like them is the block, not the pair. It is about the mean of blocks like these, and no
test can see what is too rare to be among them (`most_unseen`).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, clustered_mean, stratified_mean
from analysis.stats.pairs import FloatArray, Pairs

RANKS = "rank among the runs of its beta (0 to 1)"
"""The unit of differences if a run diverged and has no value."""


@dataclass(frozen=True, eq=False)
class Contrast:
    """Differences treatment - control of one outcome, with the weights of their mean."""

    values: FloatArray  # difference of each pair, shape [P]
    weights: FloatArray  # weight of each pair in the mean, shape [P]
    unit: str  # unit of `values`
    ranked: bool  # whether values are differences of ranks within each beta, as a run diverged


def equal_betas(pairs: Pairs) -> FloatArray:
    """Weights that make the mean over pairs the unweighted mean of the betas' means, shape [P].

    With weights by inverse variance, a beta at which nearly nothing changes would dominate the mean.
    """
    _, index, counts = np.unique(pairs.beta_index, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(counts) * counts[index]))


def independent(contrast: Contrast, pairs: Pairs) -> FloatArray | None:
    """The independent values whose mean a contrast's is, where each is one: blocks, or single differences.

    Whether a plan calls eight warm starts with one difference each blocks or pairs, they are one design.

    Returns:
        The values; None where pairs are pooled over betas or within blocks, or where differences are ranks,
        which can be the same in all of a few blocks.
    """
    if contrast.ranked or not len(pairs):
        return None
    if pairs.over_blocks:
        return np.array([each.value for each in block_means(contrast, pairs).values()])
    return contrast.values if pairs.single else None


def mean_of(contrast: Contrast, pairs: Pairs) -> Estimate:
    """The weighted mean of a contrast.

    Over blocks it is the mean of the blocks' means, whose spread gives the standard error. Otherwise the
    error is that of pairs within blocks, or of replicates if these share seeds over beta.
    """
    if (values := independent(contrast, pairs)) is not None:
        return Estimate.of_mean(values)
    if pairs.seeds_shared:
        return clustered_mean(contrast.values, contrast.weights, pairs.replicate)
    return stratified_mean(contrast.values, contrast.weights, pairs.stratum)


def block_means(contrast: Contrast, pairs: Pairs) -> dict[int, Estimate]:
    """The mean of each block, each beta counting the same, with an error from the block's own pairs."""
    means = {}
    for block in np.unique(pairs.block):
        mask = pairs.block == block
        within = replace(pairs.subset(mask), blocks=0)
        part = replace(contrast, values=contrast.values[mask], weights=equal_betas(within))
        means[int(block)] = mean_of(part, within)
    return means


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
        mask = pairs.beta_index == index
        ranks[mask] = (stats.rankdata(filled[mask], axis=None).reshape(-1, 2) - 0.5) / (2 * mask.sum())
    differences = sign * (ranks[:, 0] - ranks[:, 1])
    return Contrast(differences, equal_betas(pairs), RANKS, True)


def objective(pairs: Pairs) -> FloatArray:
    """J = reward - beta * KL at each run's own beta, shape [P, 2]; `nan` for diverged runs."""
    return pairs.reward - pairs.beta[:, None] * pairs.kl


def objective_contrast(pairs: Pairs) -> Contrast:
    """The difference in J: the unweighted mean over betas of each beta's mean.

    The estimate, the equivalence test and the swap test are all based on this mean.

    Example:
        >>> import numpy as np
        >>> one = np.array([0]), np.array([0]), np.array([0])
        >>> pairs = Pairs("a", "b", np.array([0.1]), *one, np.array([[1.0, 2.0]]), np.array([[3.0, 3.0]]))
        >>> objective_contrast(pairs).values.round(3).tolist()
        [0.1]
    """
    return difference(pairs, objective(pairs), "reward units")


LOG_RATIO = "log ratio"
"""The unit of estimates that are shown as ratios."""


def kl_contrast(pairs: Pairs) -> Contrast:
    """The difference in KL, in nats: the unweighted mean over betas."""
    return difference(pairs, pairs.kl, "nats", lower_is_better=True)


def log_kl_contrast(pairs: Pairs) -> Contrast:
    """The mean log ratio of the KLs with equal weights for all betas; by rank if a KL has no logarithm."""
    if (pairs.kl <= 0).any():
        return ranked(pairs, pairs.kl, lower_is_better=True)
    return difference(pairs, np.log(pairs.kl), LOG_RATIO, lower_is_better=True)


def kl_ratio(pairs: Pairs) -> float:
    """The geometric mean of KL(treatment) / KL(control) over pairs with positive KLs; `nan` without any.

    Example:
        >>> one = np.array([0]), np.array([0]), np.array([0])
        >>> pairs = Pairs("a", "b", np.array([0.1]), *one, np.array([[1.0, 2.0]]), np.array([[3.0, 3.0]]))
        >>> kl_ratio(pairs)
        0.5
    """
    usable = (np.isfinite(pairs.kl) & (pairs.kl > 0)).all(axis=1)
    logs = np.log(pairs.kl[usable])
    return float(np.exp((logs[:, 0] - logs[:, 1]).mean())) if usable.any() else math.nan


@dataclass(frozen=True)
class TTest:
    """The two-sided t test of a mean."""

    p_value: float
    units: int  # number of values
    over_blocks: bool = False  # whether each is the mean of a block
    attainable: float = 0.0  # the smallest p-value that it can attain


def most_unseen(blocks: int) -> float:
    """The largest share of blocks that collapse, if none of some does: Clopper and Pearson's 95% bound.

    Example:
        >>> round(most_unseen(8), 3)
        0.369
    """
    return float(stats.binomtest(0, blocks).proportion_ci(0.95, "exact").high)
