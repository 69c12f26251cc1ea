import numpy as np
import pytest
from designs import draw_pairs, pairs_of, swapped
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


def plain_net_dominance(pairs):
    """Net dominance by its definition: all pairs of a treatment run and a control run at each beta."""
    kl, reward = pairs.worst_filled()
    total, count = 0, 0
    for index in pairs.beta_indices:
        rows = np.flatnonzero(pairs.beta_index == index)
        for i in rows:
            for j in rows:
                ours, theirs = (kl[i, 0], reward[i, 0]), (kl[j, 1], reward[j, 1])
                if ours != theirs:
                    total += ours[0] <= theirs[0] and ours[1] >= theirs[1]
                    total -= ours[0] >= theirs[0] and ours[1] <= theirs[1]
                count += 1
    return total / count


@pytest.mark.parametrize("seed", range(5))
def test_frontier_equals_its_definition_with_ties_and_divergence(seed):
    rng = np.random.default_rng(seed)
    kl = rng.integers(0, 6, size=40).astype(float)
    reward = rng.integers(0, 6, size=40).astype(float)
    kl[rng.integers(40, size=4)] = np.nan
    reward[rng.integers(40, size=3)] = -np.inf
    assert frontier.nondominated(kl, reward).tolist() == plain_nondominated(kl, reward)


@pytest.mark.parametrize("seed", range(4))
def test_each_contribution_changes_its_sign_only_under_its_own_swap(seed):
    rng = np.random.default_rng(seed)
    pairs = draw_pairs(rng)
    kl = pairs.kl.round(1)
    kl[rng.integers(len(pairs)), rng.integers(2)] = np.nan
    pairs = pairs_of(kl, pairs.reward.round(1), beta_index=pairs.beta_index, replicate=pairs.replicate)
    mask = rng.random(len(pairs)) < 0.5
    for contributions in (
        frontier.share_contributions,
        frontier.replicate_share_contributions,
        frontier.net_dominance_contributions,
        frontier.matched_dominance_contributions,
    ):
        before, after = contributions(pairs), contributions(swapped(pairs, mask))
        np.testing.assert_allclose(after, np.where(mask, -before, before), atol=1e-12)


def test_share_counts_and_contributions_agree():
    pairs = draw_pairs(np.random.default_rng(1), replicates=8)
    share = frontier.pooled_share(pairs)
    contributions = frontier.share_contributions(pairs)
    assert contributions.sum() == 2 * share.count - share.total
    assert np.abs(contributions).sum() == share.discordant


def test_a_cut_removes_frontier_points_with_more_kl():
    pairs = pairs_of([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    assert frontier.pooled_share(pairs).total == 4
    assert frontier.pooled_share(pairs, 3.0).total == 2
    assert frontier.pooled_share(pairs, 0.5).total == 0


@pytest.mark.parametrize("seed", range(3))
def test_net_dominance_equals_its_double_sum(seed):
    pairs = draw_pairs(np.random.default_rng(seed), lift=1.0)
    kl = pairs.kl.copy()
    kl[0, 0] = kl[1, 1] = np.nan
    pairs = pairs_of(kl, pairs.reward, beta_index=pairs.beta_index, replicate=pairs.replicate)
    mean = frontier.net_dominance_contributions(pairs).mean()
    assert mean == pytest.approx(plain_net_dominance(pairs), abs=1e-12)


def test_replicate_share_is_the_mean_difference_of_shares():
    pairs = draw_pairs(np.random.default_rng(5), replicates=3)
    differences = []
    for replicate in range(3):
        rows = pairs.replicate == replicate
        on = np.array(plain_nondominated(pairs.kl[rows].ravel(), pairs.reward[rows].ravel())).reshape(-1, 2)
        differences.append((on[:, 0].sum() - on[:, 1].sum()) / on.sum())
    contributions = frontier.replicate_share_contributions(pairs)
    assert contributions.sum() / 3 == pytest.approx(np.mean(differences))


def test_a_diverged_run_is_dominated_by_others_and_ties_with_diverged_ones():
    pairs = pairs_of([[1, np.nan], [np.nan, np.nan], [np.nan, 2]], [[0, np.nan], [1, 1], [1, 0]])
    assert frontier.matched_dominance_contributions(pairs).tolist() == [1.0, 0.0, -1.0]


def test_the_interval_of_a_share_is_clopper_and_pearsons():
    share = frontier.Share(1, 4, 3)
    assert share.interval.ends == pytest.approx(proportion_confint(1, 4, method="beta"))
    assert share.interval.low < share.value < share.interval.high
    assert frontier.Share(0, 0, 0).interval is None
