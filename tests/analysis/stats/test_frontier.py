import numpy as np
import pytest
from designs import draw_pairs, pairs_of
from statsmodels.stats.proportion import proportion_confint

from analysis.stats import frontier


def plain_nondominated(kl, reward):
    """The definition, applied run by run."""
    points = list(zip(kl, reward, strict=True))
    finite = [np.isfinite(k) and np.isfinite(r) for k, r in points]
    return [
        finite[i]
        and not any(
            finite[j] and points[j][0] <= k and points[j][1] >= r and points[j] != (k, r)
            for j in range(len(points))
        )
        for i, (k, r) in enumerate(points)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_frontier_equals_its_definition_with_ties_and_divergence(seed):
    rng = np.random.default_rng(seed)
    kl = rng.integers(0, 6, size=40).astype(float)
    reward = rng.integers(0, 6, size=40).astype(float)
    kl[rng.integers(40, size=4)] = np.nan
    reward[rng.integers(40, size=3)] = -np.inf
    assert frontier.nondominated(kl, reward).tolist() == plain_nondominated(kl, reward)
    assert not frontier.nondominated(np.full(3, np.nan), reward[:3]).any()


def test_shares_are_counts_of_the_common_frontier_and_a_cut_leaves_those_with_less_kl():
    pairs = draw_pairs(np.random.default_rng(1), replicates=8)
    on = np.array(plain_nondominated(pairs.kl.ravel(), pairs.reward.ravel())).reshape(-1, 2)
    assert frontier.pooled_share(pairs) == frontier.Share(on[:, 0].sum(), on.sum())
    pairs = pairs_of([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    assert [frontier.pooled_share(pairs, cut).total for cut in (9.0, 3.0, 0.5)] == [4, 2, 0]


def test_a_diverged_run_is_dominated_by_others_and_ties_with_diverged_ones():
    kl = [[1, np.nan], [np.nan, np.nan], [np.nan, 2], [1, 1], [1, 2], [1, 2], [2, 2]]
    pairs = pairs_of(kl, [[0, np.nan], [1, 1], [1, 0], [2, 2], [1, 2], [1, 1], [1, 2]])
    assert frontier.dominations(pairs) == (2, 2)


def test_the_interval_of_a_share_is_clopper_and_pearsons():
    share = frontier.Share(1, 4)
    assert share.interval.ends == pytest.approx(proportion_confint(1, 4, method="beta"))
    assert share.interval.low < share.value < share.interval.high
    assert frontier.Share(0, 0).interval is None
