"""Adding seeds while looking: an e-process for paired swaps, valid at every look."""

from dataclasses import dataclass

import numpy as np

from analysis.stats.objective import objective
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.swaps import unit_sums

_BETS = np.linspace(0.1, 0.9, 9)


def swap_e_process(differences: FloatArray) -> FloatArray:
    """Evidence against exchangeable labels after each pair, in the order the pairs were run.

    M_n is the mean over bets b in +-(0.1 .. 0.9) of prod_i (1 + b w_i sign(d_i)). The weight w_i in [0, 1]
    uses |d_i| and earlier pairs only: given those, a swap makes each sign a fair coin, so M is a martingale
    of mean 1 and P(M ever reaches 1 / alpha) <= alpha (Ville). Rejecting once M_n >= 1 / alpha is valid
    whenever one looks and stops; a number of seeds fixed in advance and the swap test need fewer.

    Args:
        differences: Difference of each pair, in order, shape [N]; 0 for a tie.

    Returns:
        M_1 .. M_N, shape [N].

    Example:
        >>> swap_e_process(np.array([1.0, 1.0, 1.0])).round(2).tolist()
        [1.0, 1.08, 1.24]
    """
    sizes = np.abs(differences)
    weights = np.array(
        [size / max(size, 2 * np.median(sizes[: i + 1])) if size > 0 else 0.0 for i, size in enumerate(sizes)]
    )
    bets = np.concatenate([_BETS, -_BETS])
    factors = 1 + bets[:, None] * (weights * np.sign(differences))
    return np.asarray(np.exp(np.cumsum(np.log(factors), axis=1)).mean(axis=0))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the pairs say about J = reward - beta * KL, one after another.

    Attributes:
        differences: Treatment minus control in J, of what is swapped on its own: pairs in the order
            replicate, beta, or whole replicates; shape [N].
        values: The e-process after each, shape [N].
    """

    differences: FloatArray
    values: FloatArray

    def crossing(self, threshold: float) -> int | None:
        """After how many the evidence first reached a threshold; None if it has not."""
        reached = np.flatnonzero(self.values >= threshold)
        return int(reached[0]) + 1 if len(reached) else None


def objective_evidence(pairs: Pairs) -> Evidence:
    """The e-process of the differences in J, in the order in which a sweep runs its pairs.

    Where one run of a pair diverged the other is better, by as much as any pair before.
    """
    ordered = np.lexsort((pairs.level, pairs.replicate))
    values = objective(pairs)[ordered]
    gone = pairs.diverged[ordered]
    differences = np.where(gone.any(axis=1), 0.0, values[:, 0] - values[:, 1])
    for i in np.flatnonzero(gone[:, 0] != gone[:, 1]):
        largest = np.abs(differences[:i]).max(initial=0.0)
        differences[i] = (largest or 1.0) * (1 if gone[i, 1] else -1)
    sums = unit_sums(differences, pairs.unit[ordered]) if pairs.blocked else differences
    return Evidence(sums, swap_e_process(sums))
