"""Differences in KL and in reward, the two terms of J."""

import math

import numpy as np

from analysis.stats.contrast import Contrast, equal_betas, ranked
from analysis.stats.pairs import Pairs

LOG_RATIO = "log ratio"
"""The unit of estimates that are shown as ratios."""


def kl_contrast(pairs: Pairs) -> Contrast:
    """The difference in KL, in nats: the unweighted mean over betas."""
    if pairs.diverged.any():
        return _lower_first(pairs)
    return Contrast(pairs.kl[:, 0] - pairs.kl[:, 1], equal_betas(pairs), "nats", ranked=False)


def log_kl_contrast(pairs: Pairs) -> Contrast:
    """The mean log ratio of the KLs with equal weights for all betas; by rank if a KL has no logarithm."""
    if pairs.diverged.any() or (pairs.kl <= 0).any():
        return _lower_first(pairs)
    logs = np.log(pairs.kl)
    return Contrast(logs[:, 0] - logs[:, 1], equal_betas(pairs), LOG_RATIO, ranked=False)


def reward_contrast(pairs: Pairs) -> Contrast:
    """The difference in reward: the unweighted mean over betas."""
    if pairs.diverged.any():
        return ranked(pairs, pairs.reward)
    return Contrast(pairs.reward[:, 0] - pairs.reward[:, 1], equal_betas(pairs), "reward units", ranked=False)


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


def _lower_first(pairs: Pairs) -> Contrast:
    """Ranks of the KL, in which a diverged run has the highest KL."""
    found = ranked(pairs, -pairs.kl)
    return Contrast(-found.values, found.weights, found.unit, ranked=True)
