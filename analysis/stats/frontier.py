"""What is on the frontier of (KL, reward), and which run of a pair dominates the other, as counts.

Lower KL and higher reward are better. A run is on the frontier unless another one is at least as good in both
outcomes and better in one; of runs that tie exactly, all are on it. A diverged run never is. A share of the
frontier increases with an arm's spread as well as with its quality, and depends on the number of replicates:
it describes runs and says nothing of which arm is better.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.stats.intervals import Interval
from analysis.stats.pairs import BoolArray, FloatArray, Pairs


def nondominated(kl: FloatArray, reward: FloatArray) -> BoolArray:
    """Which runs are on the frontier.

    Args:
        kl: KL in nats, any shape; `nan` (or infinite) for a diverged run.
        reward: Mean reward, same shape.

    Returns:
        Mask of the same shape; false where a run diverged.

    Example:
        >>> nondominated(np.array([1.0, 1.0, 2.0, np.nan]), np.array([0.5, 0.5, 0.4, 9.0])).tolist()
        [True, True, False, False]
    """
    finite = np.isfinite(kl) & np.isfinite(reward)
    mask = np.zeros(kl.shape, dtype=bool)
    kls, index = np.unique(kl[finite], return_inverse=True)
    best = np.full(len(kls), -np.inf)
    np.maximum.at(best, index, reward[finite])  # of the runs with each KL
    before = np.concatenate([[-np.inf], np.maximum.accumulate(best)[:-1]])  # of those with a lower one
    mask[finite] = (reward[finite] == best[index]) & (reward[finite] > before[index])
    return mask


@dataclass(frozen=True)
class Share:
    """A count out of a total."""

    count: int
    total: int

    @property
    def value(self) -> float:
        """The fraction; `nan` if the total is 0."""
        return self.count / self.total if self.total else float("nan")

    @property
    def interval(self) -> Interval | None:
        """The Clopper-Pearson 95% interval, for independent trials; None if the total is 0."""
        if not self.total:
            return None
        ends = stats.binomtest(self.count, self.total).proportion_ci(0.95, "exact")
        return Interval(float(ends.low), float(ends.high), 0.95)


def pooled_frontier(pairs: Pairs, cut: float = np.inf) -> BoolArray:
    """Membership of the frontier of all runs together, cut to KL < `cut`; shape [P, 2]."""
    return nondominated(pairs.kl, pairs.reward) & (np.nan_to_num(pairs.kl, nan=np.inf) < cut)


def pooled_share(pairs: Pairs, cut: float = np.inf) -> Share:
    """The treatment's runs of those on the pooled frontier with a KL below `cut`."""
    member = pooled_frontier(pairs, cut)
    return Share(int(member[:, 0].sum()), int(member.sum()))


def dominations(pairs: Pairs) -> tuple[int, int]:
    """Number of pairs in which the treatment's run dominates the control's, and in which it is dominated."""
    gone = pairs.diverged
    kl, reward = np.where(gone, np.inf, pairs.kl), np.where(gone, -np.inf, pairs.reward)
    treated, control = (
        (kl[:, side] <= kl[:, 1 - side]) & (reward[:, side] >= reward[:, 1 - side]) for side in (0, 1)
    )
    return int((treated & ~control).sum()), int((control & ~treated).sum())
