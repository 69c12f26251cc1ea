"""Differences in KL and in reward, the two terms of J."""

import math

import numpy as np

from analysis.stats.contrast import Contrast, difference, ranked
from analysis.stats.pairs import Pairs

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


def reward_contrast(pairs: Pairs) -> Contrast:
    """The difference in reward: the unweighted mean over betas."""
    return difference(pairs, pairs.reward, "reward units")


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
