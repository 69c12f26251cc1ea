"""The objective of training: J = reward - beta * KL."""

from analysis.stats.contrast import Contrast, difference
from analysis.stats.pairs import FloatArray, Pairs


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
