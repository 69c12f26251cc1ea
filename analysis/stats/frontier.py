"""Pareto statistics of (KL, reward) outcomes: frontier shares, dominance and hypervolume of matched pairs.

Direction and ties: lower KL and higher reward are better. A run is on the frontier unless another one is at
least as good in both outcomes and better in one; of runs that tie exactly, all are on it. A diverged run is
dominated by every run that did not diverge, and is never on the frontier.
"""

from dataclasses import dataclass

import moocore
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
    # A nan may make moocore drop finite runs
    finite = np.isfinite(kl) & np.isfinite(reward)
    mask = np.zeros(kl.shape, dtype=bool)
    if finite.any():
        points = np.column_stack([kl[finite], reward[finite]])
        mask[finite] = moocore.is_nondominated(points, maximise=[False, True], keep_weakly=True)
    return mask


def dominance(kl: FloatArray, reward: FloatArray) -> FloatArray:
    """Matrix of +1 where the row's run dominates the column's, -1 where it is dominated by it, else 0.

    Args:
        kl: KL with `inf` for diverged runs, shape [N].
        reward: Reward with `-inf` for diverged runs, shape [N].
    """
    weakly = (kl[:, None] <= kl) & (reward[:, None] >= reward)
    return weakly.astype(np.float64) - weakly.T


@dataclass(frozen=True)
class Share:
    """The treatment's share of the frontier points."""

    count: int  # frontier points of the treatment
    total: int  # frontier points of both, |F|
    discordant: int  # pairs with exactly one run on the frontier; only these affect the swap test

    @property
    def value(self) -> float:
        """The share; `nan` without frontier points."""
        return self.count / self.total if self.total else float("nan")

    @property
    def interval(self) -> Interval | None:
        """Clopper and Pearson's 95% interval of the share of so many points; None without any."""
        if not self.total:
            return None
        found = stats.binomtest(self.count, self.total).proportion_ci(0.95, "exact")
        return Interval(float(found.low), float(found.high), 0.95)


def pooled_frontier(pairs: Pairs, cut: float = np.inf) -> BoolArray:
    """Membership of the frontier of all runs together, cut to KL < `cut`; shape [P, 2].

    The set is invariant under swaps of labels, so that the share has an exact swap test.
    """
    return nondominated(pairs.kl, pairs.reward) & (np.nan_to_num(pairs.kl, nan=np.inf) < cut)


def pooled_share(pairs: Pairs, cut: float = np.inf) -> Share:
    """The treatment's share of the pooled frontier.

    The share increases with an arm's spread as well as with its quality, and depends on the number of
    replicates. It is descriptive and never decides which estimator is better.

    Args:
        pairs: The matched pairs.
        cut: Only frontier points with KL below this count.
    """
    member = pooled_frontier(pairs, cut)
    one_sided = member[:, 0] != member[:, 1]
    return Share(int(member[:, 0].sum()), int(member.sum()), int(one_sided.sum()))


def share_contributions(pairs: Pairs, cut: float = np.inf) -> FloatArray:
    """+1 for a pair with only the treatment on the pooled frontier, -1 with only the control, else 0."""
    member = pooled_frontier(pairs, cut).astype(np.float64)
    return member[:, 0] - member[:, 1]


def replicate_share_contributions(pairs: Pairs) -> FloatArray:
    """Membership of each replicate's own frontier, divided by the size of that frontier.

    The sum over a replicate's pairs is its treatment share minus its control share. Unlike that of the pooled
    share, its expectation does not depend on the number of replicates.
    """
    contributions = np.zeros(len(pairs))
    for replicate in np.unique(pairs.replicate):
        rows = pairs.replicate == replicate
        member = nondominated(pairs.kl[rows], pairs.reward[rows]).astype(np.float64)
        contributions[rows] = (member[:, 0] - member[:, 1]) / max(1.0, member.sum())
    return contributions


def net_dominance_contributions(pairs: Pairs) -> FloatArray:
    """P(treatment dominates control) - P(control dominates treatment) over all pairs of replicates.

    At each beta every treatment run is compared with every control run; incomparable runs count 0. As
    dominance is antisymmetric, the double sum is a sum over runs of (#dominated - #dominating), and therefore
    a sum of swap contributions. Their mean over pairs is the net probability.
    """
    contributions = np.zeros(len(pairs))
    kl, reward = pairs.worst_filled()
    for index in pairs.beta_indices:
        rows = pairs.beta_index == index
        scores = dominance(kl[rows].ravel(), reward[rows].ravel()).sum(axis=1).reshape(-1, 2)
        contributions[rows] = (scores[:, 0] - scores[:, 1]) / (2 * rows.sum())
    return contributions


def matched_dominance_contributions(pairs: Pairs) -> FloatArray:
    """+1 for a pair in which the treatment dominates, -1 in which the control does, else 0."""
    return np.array([dominance(kl, reward)[0, 1] for kl, reward in zip(*pairs.worst_filled(), strict=True)])


Reference = tuple[float, float]
"""(KL in nats, reward) of the corner from which hypervolume is measured."""


def hypervolume(kl: FloatArray, reward: FloatArray, reference: Reference) -> float:
    """Area dominated by a set of runs, on (log KL, reward), up to a reference corner.

    Args:
        kl: KL in nats, positive, shape [N]; without diverged runs.
        reward: Mean reward, shape [N].
        reference: Corner; runs outside it contribute nothing.

    Returns:
        Area in nats of log KL times reward units; 0 for no runs.

    Raises:
        ValueError: If a coordinate is not finite, or a KL is not positive.

    Example:
        >>> round(hypervolume(np.array([1.0]), np.array([2.0]), (np.e, 0.0)), 6)
        2.0
    """
    if not (np.isfinite(kl).all() and np.isfinite(reward).all() and (kl > 0).all()):
        raise ValueError(
            "hypervolume needs finite rewards and positive, finite KL: remove diverged runs first"
        )
    if not len(kl):
        return 0.0
    corner = [np.log(reference[0]), reference[1]]
    return float(moocore.hypervolume(np.column_stack([np.log(kl), reward]), corner, maximise=[False, True]))


def hypervolume_differences(pairs: Pairs, reference: Reference) -> FloatArray:
    """HV(treatment) - HV(control) of the runs of each replicate, without diverged ones; shape [S].

    A hypervolume is not a sum over pairs: a swap exchanges the labels of a whole replicate.

    Args:
        pairs: The matched pairs.
        reference: Corner fixed in advance. With a corner computed from all runs a test remains exact, but
            the difference cannot be compared with that of other sweeps.
    """
    volumes = np.zeros((pairs.replicates, 2))
    for place, replicate in enumerate(np.unique(pairs.replicate)):
        for side in (0, 1):
            rows = (pairs.replicate == replicate) & ~pairs.diverged[:, side]
            volumes[place, side] = hypervolume(pairs.kl[rows, side], pairs.reward[rows, side], reference)
    return np.asarray(volumes[:, 0] - volumes[:, 1])
