"""Adding seeds while looking: an e-process for paired swaps, valid at every look."""

from dataclasses import dataclass

import numpy as np

from analysis.stats.pairs import FloatArray, IntArray, Pairs
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
    return np.asarray(_wealth(differences).mean(axis=0))


def _wealth(differences: FloatArray) -> FloatArray:
    """What those own who bet on positive differences, and on negative ones, after each pair; shape [2, N]."""
    sizes = np.abs(differences)
    weights = np.array(
        [size / max(size, 2 * np.median(sizes[: i + 1])) if size > 0 else 0.0 for i, size in enumerate(sizes)]
    )
    bets = np.stack([_BETS, -_BETS])
    factors = 1 + bets[:, :, None] * (weights * np.sign(differences))
    return np.asarray(np.exp(np.cumsum(np.log(factors), axis=-1)).mean(axis=1))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the pairs say about the outcome that decides, one after another.

    Attributes:
        differences: Treatment minus control, positive where the treatment is better, of what is swapped on
            its own: pairs in their order, or whole replicates; shape [N].
        threshold: What the e-process must reach.
        unit: What one difference is of.
    """

    differences: FloatArray
    threshold: float
    unit: str = "matched pair"

    @property
    def values(self) -> FloatArray:
        """The e-process after each, shape [N]."""
        return swap_e_process(self.differences)

    @property
    def crossing(self) -> int | None:
        """After how many the threshold was first reached; None if it has not been."""
        reached = np.flatnonzero(self.values >= self.threshold)
        return int(reached[0]) + 1 if len(reached) else None

    @property
    def favours_treatment(self) -> bool:
        """Whether those who bet on the treatment own more: at the crossing, or else by now."""
        seen = self.crossing or len(self.differences)
        for_it, against_it = _wealth(self.differences)[:, seen - 1]
        return bool(for_it > against_it)


def evidence_of(
    pairs: Pairs, values: FloatArray, threshold: float, added: IntArray | None = None
) -> Evidence:
    """The e-process of the differences in an outcome, in the order in which a sweep runs its pairs.

    Where one run of a pair diverged the other is better, by as much as any pair before.

    Args:
        pairs: The matched pairs.
        values: The outcome of each run, higher being better, shape [P, 2].
        threshold: What the e-process must reach: comparisons / alpha.
        added: In which version of the plan each pair was added, shape [P]. What was added after a look comes
            after what was looked at, whatever its beta and replicate.
    """
    added = np.zeros(len(pairs), dtype=np.int64) if added is None else added
    ordered = np.lexsort((pairs.beta_index, pairs.replicate, added))
    values, gone = values[ordered], pairs.diverged[ordered]
    differences = np.where(gone.any(axis=1), 0.0, values[:, 0] - values[:, 1])
    for i in np.flatnonzero(gone[:, 0] != gone[:, 1]):
        largest = np.abs(differences[:i]).max(initial=0.0)
        differences[i] = (largest or 1.0) * (1 if gone[i, 1] else -1)
    if pairs.blocked:
        return Evidence(unit_sums(differences, pairs.unit[ordered]), threshold, "replicate")
    return Evidence(differences, threshold)
