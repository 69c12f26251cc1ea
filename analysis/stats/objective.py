"""What both estimators optimise: J = reward - beta * KL, and reward at matched KL."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.stats.pairs import FloatArray, Pairs


@dataclass(frozen=True, eq=False)
class Contrast:
    """Differences treatment - control of one outcome, with the weights under which they are averaged.

    Attributes:
        values: Difference of each pair, shape [P].
        weights: Weight of each pair in the mean, constant within a KL weight, shape [P].
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


def objective(pairs: Pairs) -> FloatArray:
    """J = reward - beta * KL at each run's own beta, shape [P, 2]; `nan` for diverged runs."""
    return pairs.reward - pairs.beta[:, None] * pairs.kl


def objective_contrast(pairs: Pairs) -> Contrast:
    """The mean difference in J, each KL weight weighted by 1 / SD of J over all its runs.

    The SD is taken over the runs of both estimators together and does not change under swaps, so the swap
    test of this mean is the test of the studentised statistic, and estimate and test agree in sign.

    Example:
        >>> one = np.array([0]), np.array([0]), np.array([0])
        >>> pairs = Pairs("a", "b", np.array([0.1]), *one, np.array([[1.0, 2.0]]), np.array([[3.0, 3.0]]))
        >>> objective_contrast(pairs).values.round(3).tolist()
        [0.1]
    """
    values = objective(pairs)
    if pairs.diverged.any():
        return _ranked(pairs, values)
    weights = np.zeros(len(pairs))
    for index in pairs.beta_indices:
        rows = pairs.beta_index == index
        spread = values[rows].std()
        weights[rows] = 1 / spread if spread > 0 else 0.0
    return Contrast(values[:, 0] - values[:, 1], weights, "reward units", ranked=False)


def matched_kl_contrast(pairs: Pairs) -> Contrast:
    """The mean difference in reward left after one curve in sqrt(KL), fitted to all runs together.

    The curve ignores labels, so it does not change under swaps and the test stays exact.
    """
    residuals = matched_kl_residuals(pairs)
    if pairs.diverged.any():
        return _ranked(pairs, residuals)
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


def _ranked(pairs: Pairs, values: FloatArray) -> Contrast:
    """Ranks within each KL weight, scaled to (0, 1); diverged runs share the lowest."""
    filled = np.where(pairs.diverged, -np.inf, values)
    ranks = np.zeros_like(filled)
    for index in pairs.beta_indices:
        rows = pairs.beta_index == index
        ranks[rows] = (stats.rankdata(filled[rows], axis=None).reshape(-1, 2) - 0.5) / (2 * rows.sum())
    return Contrast(
        ranks[:, 0] - ranks[:, 1], np.ones(len(pairs)), "rank among the runs of its beta (0 to 1)", True
    )
