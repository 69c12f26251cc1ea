"""An e-process for matched pairs: evidence that remains valid however often results are examined."""

from dataclasses import dataclass

import numpy as np

from analysis.stats.pairs import FloatArray, IntArray, Pairs
from analysis.stats.swaps import unit_sums

_BETS = np.linspace(0.1, 0.9, 9)


def swap_e_process(differences: FloatArray) -> FloatArray:
    """EProcess against exchangeable labels after each pair, in the order in which pairs were run.

    M_n is the mean over bets b in +-(0.1, ..., 0.9) of prod_i (1 + b w_i sign(d_i)). The weight w_i in [0, 1]
    depends only on |d_i| and earlier pairs. Given these, each sign is a fair coin under exchangeability, so M
    is a martingale of mean 1 and P(M ever reaches 1 / alpha) <= alpha (Ville). Rejecting if M_n >= 1 / alpha
    is valid for any stopping rule; with a number of seeds fixed in advance, the swap test needs fewer.

    Args:
        differences: Difference of each pair, in order, shape [N]; 0 for a tie.

    Returns:
        M_1 .. M_N, shape [N].

    Example:
        >>> swap_e_process(np.array([1.0, 1.0, 1.0])).round(2).tolist()
        [1.0, 1.08, 1.24]
    """
    return np.asarray(_wealth(differences).mean(axis=0))


def _wealth(differences: FloatArray) -> FloatArray:
    """Wealth of bets on positive and of bets on negative differences after each pair, shape [2, N]."""
    sizes = np.abs(differences)
    weights = np.array(
        [size / max(size, 2 * np.median(sizes[: i + 1])) if size > 0 else 0.0 for i, size in enumerate(sizes)]
    )
    bets = np.stack([_BETS, -_BETS])
    factors = 1 + bets[:, :, None] * (weights * np.sign(differences))
    return np.asarray(np.exp(np.cumsum(np.log(factors), axis=-1)).mean(axis=1))


@dataclass(frozen=True, eq=False)
class EProcess:
    """The e-process of the primary outcome.

    Attributes:
        differences: Difference of each swap unit (pair, or whole replicate) in order, positive where the
            treatment is better, shape [N].
        threshold: The value at which the e-process rejects.
        unit: Name of the swap unit.
    """

    differences: FloatArray
    threshold: float
    unit: str = "matched pair"

    @property
    def values(self) -> FloatArray:
        """The e-process after each difference, shape [N]."""
        return swap_e_process(self.differences)

    @property
    def crossing(self) -> int | None:
        """Number of differences after which the threshold was first reached; None if it was not."""
        reached = np.flatnonzero(self.values >= self.threshold)
        return int(reached[0]) + 1 if len(reached) else None

    @property
    def favours_treatment(self) -> bool:
        """Whether bets on the treatment have more wealth, at the crossing or else at the end."""
        seen = self.crossing or len(self.differences)
        for_it, against_it = _wealth(self.differences)[:, seen - 1]
        return bool(for_it > against_it)


def evidence_of(
    pairs: Pairs, values: FloatArray, threshold: float, added: IntArray | None = None
) -> EProcess:
    """The e-process of the differences in an outcome, in the order in which a sweep runs its pairs.

    If one run of a pair diverged, the other one is better by the largest difference of the earlier pairs.

    Args:
        pairs: The matched pairs.
        values: The outcome of each run, shape [P, 2]; higher is better.
        threshold: The value at which the e-process rejects: comparisons / alpha.
        added: The version of the plan that added each pair, shape [P]. Pairs of later versions come after
            those of earlier ones, as results had been seen in between.
    """
    added = np.zeros(len(pairs), dtype=np.int64) if added is None else added
    ordered = np.lexsort((pairs.beta_index, pairs.replicate, added))
    values, gone = values[ordered], pairs.diverged[ordered]
    differences = np.where(gone.any(axis=1), 0.0, values[:, 0] - values[:, 1])
    for i in np.flatnonzero(gone[:, 0] != gone[:, 1]):
        largest = np.abs(differences[:i]).max(initial=0.0)
        differences[i] = (largest or 1.0) * (1 if gone[i, 1] else -1)
    if pairs.seeds_shared:
        return EProcess(unit_sums(differences, pairs.unit[ordered]), threshold, "replicate")
    return EProcess(differences, threshold)
