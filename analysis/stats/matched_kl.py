"""The reward at matched KL: what one estimator's runs earn more than the other's at the same KL."""

import numpy as np

from analysis.stats.contrast import Contrast, ranked
from analysis.stats.pairs import FloatArray, Pairs


def matched_kl_contrast(pairs: Pairs) -> Contrast:
    """The mean difference in reward left after one curve in sqrt(KL), fitted to all runs together.

    The curve ignores labels, so it does not change under swaps and the test stays exact.
    """
    residuals = matched_kl_residuals(pairs)
    if pairs.diverged.any():
        return ranked(pairs, residuals)
    return Contrast(residuals[:, 0] - residuals[:, 1], np.ones(len(pairs)), "reward units", ranked=False)


def matched_kl_residuals(pairs: Pairs) -> FloatArray:
    """Reward minus the pooled curve at the run's KL, shape [P, 2]; `nan` for diverged runs."""
    coefficients = reward_curve(pairs.kl, pairs.reward)
    return pairs.reward - np.polynomial.polynomial.polyval(np.sqrt(np.maximum(pairs.kl, 0.0)), coefficients)


def reward_curve(kl: FloatArray, reward: FloatArray) -> FloatArray:
    """Coefficients of reward ~ c0 + c1 sqrt(KL) + c2 KL by least squares over the finite runs.

    With fewer than six distinct KL values the curve is a line, with fewer than four a constant: a curve
    through every point would leave nothing to compare.
    """
    finite = np.isfinite(kl) & np.isfinite(reward)
    if not finite.any():
        return np.zeros(1)
    root = np.sqrt(np.maximum(kl[finite], 0.0))
    distinct = len(np.unique(root))
    degree = 2 if distinct >= 6 else 1 if distinct >= 4 else 0
    design = np.polynomial.polynomial.polyvander(root, degree)
    return np.asarray(np.linalg.lstsq(design, reward[finite], rcond=None)[0])
