"""Differences between matched runs in one outcome."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, clustered_mean, stratified_mean
from analysis.stats.pairs import FloatArray, Pairs


@dataclass(frozen=True, eq=False)
class Contrast:
    """Differences treatment - control of one outcome, with the weights under which they are averaged.

    Attributes:
        values: Difference of each pair, shape [P].
        weights: Weight of each pair in the mean, shape [P].
        unit: Unit of `values`.
        ranked: Whether ranks within each KL weight replaced values because a run diverged.
    """

    values: FloatArray
    weights: FloatArray
    unit: str
    ranked: bool

    @property
    def contributions(self) -> FloatArray:
        """What each pair adds to the statistic of the swap test, shape [P]."""
        return self.values * self.weights


def equal_betas(pairs: Pairs) -> FloatArray:
    """Weights under which a mean over pairs is the plain mean over betas of each beta's mean, shape [P].

    Weights by spread would let a beta at which nothing moves outvote the others.
    """
    _, place, counts = np.unique(pairs.beta_index, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(counts) * counts[place]))


def mean_of(contrast: Contrast, pairs: Pairs) -> Estimate:
    """The weighted mean of a contrast, with the standard error its design allows."""
    if pairs.blocked:
        return clustered_mean(contrast.values, contrast.weights, pairs.replicate)
    return stratified_mean(contrast.values, contrast.weights, pairs.beta_index)


def ranked(pairs: Pairs, values: FloatArray) -> Contrast:
    """Ranks within each KL weight, scaled to (0, 1); diverged runs share the lowest."""
    filled = np.where(pairs.diverged, -np.inf, values)
    ranks = np.zeros_like(filled)
    for index in pairs.beta_indices:
        rows = pairs.beta_index == index
        ranks[rows] = (stats.rankdata(filled[rows], axis=None).reshape(-1, 2) - 0.5) / (2 * rows.sum())
    return Contrast(
        ranks[:, 0] - ranks[:, 1], equal_betas(pairs), "rank among the runs of its beta (0 to 1)", True
    )
