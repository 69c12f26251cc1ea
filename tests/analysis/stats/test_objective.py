import numpy as np
import pytest
from designs import draw_pairs, pairs_of, swapped

from analysis.stats.contrast import (
    difference,
    kl_contrast,
    log_kl_contrast,
    mean_of,
    objective,
    objective_contrast,
)
from analysis.stats.intervals import clustered_mean, stratified_mean

CONTRASTS = (objective_contrast, kl_contrast, log_kl_contrast)


@pytest.mark.parametrize("contrast_of", CONTRASTS)
@pytest.mark.parametrize("diverged", [False, True])
def test_a_swap_changes_one_difference_and_no_weights(contrast_of, diverged):
    rng = np.random.default_rng(4)
    pairs = draw_pairs(rng)
    if diverged:
        pairs.reward[2, 1] = np.nan
    mask = rng.random(len(pairs)) < 0.5
    before, after = contrast_of(pairs), contrast_of(swapped(pairs, mask))
    np.testing.assert_allclose(after.values, np.where(mask, -before.values, before.values), atol=1e-10)
    np.testing.assert_allclose(after.weights, before.weights)
    assert before.ranked is diverged


def test_objective_by_hand():
    pairs = pairs_of([[2, 4], [1, 3]], [[1, 1.5], [2, 2]], beta_index=[0, 1])
    assert objective(pairs).tolist() == [[0.8, 1.1], [1.8, 1.4]]
    contrast = objective_contrast(pairs)
    np.testing.assert_allclose(contrast.values, [-0.3, 0.4])
    assert mean_of(contrast, pairs).value == pytest.approx(0.05)


def test_every_beta_has_the_same_weight():
    # J moves at two betas and not at all at the third, which has the most pairs
    beta_index = [0, 0, 1, 1, 1, 2, 2, 2, 2]
    lift = np.array([-0.7, -0.8, -0.5, -0.6, -0.4, 1e-3, -1e-3, 1e-3, -1e-3])
    reward = np.stack([lift, np.zeros(9)], axis=1)
    replicate = [0, 1, 0, 1, 2, 0, 1, 2, 3]
    pairs = pairs_of(np.ones((9, 2)), reward, beta_index=beta_index, replicate=replicate)
    estimate = mean_of(objective_contrast(pairs), pairs)
    assert estimate.value == pytest.approx((-0.75 - 0.5 + 0) / 3)
    assert not estimate.interval(0.9).within(0.1)
    by_beta = [lift[np.array(beta_index) == index] for index in range(3)]
    error = np.sqrt(sum(part.var(ddof=1) / len(part) for part in by_beta)) / 3
    assert estimate.standard_error == pytest.approx(error)


def test_ranks_by_hand():
    # J at one beta of 0.1: 1, 2, 3 and a divergence: ranks 2, 3, 4 and 1 of 4
    pairs = pairs_of([[0, 0], [0, np.nan]], [[1, 2], [3, 9]])
    contrast = objective_contrast(pairs)
    np.testing.assert_allclose(contrast.values, [(2 - 3) / 4, (4 - 1) / 4])


def test_all_diverged_is_a_tie():
    pairs = pairs_of(np.full((3, 2), np.nan), np.zeros((3, 2)))
    for contrast_of in CONTRASTS:
        assert contrast_of(pairs).values.tolist() == [0.0, 0.0, 0.0]


def test_kl_and_reward_by_hand_and_a_diverged_run_has_the_highest_kl():
    pairs = pairs_of([[2, 4], [1, 3]], [[1, 1.5], [2, 2]], beta_index=[0, 1])
    assert kl_contrast(pairs).values.tolist() == [-2, -2]
    np.testing.assert_allclose(log_kl_contrast(pairs).values, np.log([2 / 4, 1 / 3]))
    assert difference(pairs, pairs.reward, "").values.tolist() == [-0.5, 0]
    lost = pairs_of([[2, np.nan], [3, 1]], [[1, 1], [1, 1]])
    # KLs 2, diverged, 3 and 1 at one beta: ranks 2, 4, 3 and 1 of 4
    for contrast_of in (kl_contrast, log_kl_contrast):
        np.testing.assert_allclose(contrast_of(lost).values, [(2 - 4) / 4, (3 - 1) / 4])
    assert log_kl_contrast(pairs_of([[0, 1]], [[1, 1]])).ranked


def test_clusters_of_equal_size_are_a_t_interval_over_cluster_means():
    values = np.random.default_rng(2).normal(size=(5, 3))
    estimate = clustered_mean(values.ravel(), np.ones(15), np.repeat(np.arange(5), 3))
    means = values.mean(1)
    assert estimate.degrees == 4
    assert estimate.standard_error == pytest.approx(means.std(ddof=1) / np.sqrt(5))


def test_too_few_replicates_have_no_interval():
    assert stratified_mean(np.array([1.0, 2.0]), np.ones(2), np.array([0, 1])).interval() is None
    assert clustered_mean(np.array([1.0, 2.0]), np.ones(2), np.array([0, 0])).interval() is None
    assert np.isnan(stratified_mean(np.zeros(0), np.zeros(0), np.zeros(0)).value)


def test_equivalence_is_statsmodels_tost():
    from statsmodels.stats.weightstats import ttost_paired

    ours, theirs = np.random.default_rng(3).normal(size=(2, 12)) * 0.3
    estimate = stratified_mean(ours - theirs, np.ones(12), np.zeros(12, int))
    p_value = ttost_paired(ours, theirs, -0.4, 0.4)[0]
    assert estimate.interval(1 - 2 * p_value * 1.001).within(0.4)
    assert not estimate.interval(1 - 2 * p_value * 0.999).within(0.4)
