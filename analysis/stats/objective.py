"""What both estimators optimise: J = reward - beta * KL."""

import numpy as np

from analysis.stats.contrast import Contrast, ranked
from analysis.stats.pairs import FloatArray, Pairs


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
        return ranked(pairs, values)
    weights = np.zeros(len(pairs))
    for index in pairs.beta_indices:
        rows = pairs.beta_index == index
        spread = values[rows].std()
        weights[rows] = 1 / spread if spread > 0 else 0.0
    return Contrast(values[:, 0] - values[:, 1], weights, "reward units", ranked=False)
