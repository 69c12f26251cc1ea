"""Evidence pair by pair, and several estimators at once."""

import itertools

import numpy as np
import pytest
from designs import draw_pairs, pairs_of

from analysis.stats.max_t import max_t_p_values, objective_max_t
from analysis.stats.objective import objective
from analysis.stats.sequential import objective_evidence, swap_e_process

SIGNS = np.array(list(itertools.product((1, -1), repeat=6)))


def test_the_e_process_is_a_fair_game_and_its_chance_to_reach_twenty_is_below_a_twentieth():
    sizes = np.array([1.0, 0.5, 2.0, 0.0, 1.5, 0.7])
    paths = np.array([swap_e_process(signs * sizes) for signs in SIGNS])
    assert np.allclose(paths.mean(0), 1)
    rng = np.random.default_rng(4)
    reached = [swap_e_process(rng.normal(size=60)).max() >= 20 for _ in range(400)]
    assert np.mean(reached) <= 0.05
    assert swap_e_process(np.full(40, 1.0))[-1] > 20


def test_pairs_count_in_the_order_they_are_run_and_blocks_as_one():
    pairs = draw_pairs(np.random.default_rng(0), replicates=3, betas=(0.1, 0.3))
    differences = objective(pairs)[:, 0] - objective(pairs)[:, 1]
    order = sorted(range(6), key=lambda i: (pairs.replicate[i], pairs.beta_index[i]))
    found = objective_evidence(pairs, 20.0)
    assert np.array_equal(found.differences, differences[order])
    assert np.array_equal(found.values, swap_e_process(differences[order]))
    blocked = draw_pairs(np.random.default_rng(0), replicates=3, betas=(0.1, 0.3), blocked=True)
    expected = [differences[pairs.replicate == replicate].sum() for replicate in range(3)]
    assert np.allclose(objective_evidence(blocked, 20.0).differences, expected)


def test_a_diverged_run_loses_by_as_much_as_any_pair_before_and_two_lose_nothing():
    reward = [[1.0, 0.5], [np.nan, 1.0], [np.nan, np.nan], [2.0, np.nan]]
    found = objective_evidence(pairs_of(np.ones((4, 2)), reward), 20.0)
    assert found.differences.tolist() == [0.5, -0.5, 0.0, 0.5]
    assert np.isfinite(found.values).all()


def test_a_crossing_is_the_first():
    for sign in (1.0, -1.0):
        pairs = pairs_of(np.ones((9, 2)), [[sign, 0.0]] * 9)
        found = objective_evidence(pairs, 2.0)
        assert found.crossing == int(np.argmax(found.values >= 2)) + 1
        assert found.favours_treatment == (sign > 0)
        assert objective_evidence(pairs, 1e9).crossing is None


def test_one_large_loss_after_many_wins_does_not_turn_the_evidence():
    found = objective_evidence(pairs_of(np.ones((12, 2)), [[1.0, 0.0]] * 11 + [[-99.0, 0.0]]), 2.0)
    assert found.differences.sum() < 0
    assert found.favours_treatment


def test_what_was_added_after_a_look_comes_after_what_was_looked_at():
    pairs = draw_pairs(np.random.default_rng(0), replicates=2, betas=(0.1, 0.3))
    added = np.array([0, 1, 0, 1])  # the second replicate came later
    found = objective_evidence(pairs, 20.0, 1 - added)
    differences = objective(pairs)[:, 0] - objective(pairs)[:, 1]
    assert np.array_equal(found.differences, differences[[1, 3, 0, 2]])


@pytest.mark.parametrize("control", [0, 2])
def test_max_t_is_full_enumeration_over_the_labels_of_every_set(control):
    values = np.array([[1.0, 2.0, 0.3], [0.5, 1.9, 0.1], [1.2, 1.1, 0.4]])
    weights = np.array([1.0, 2.0, 0.5])

    def largest(relabelled):
        totals = weights @ np.asarray(relabelled)
        return np.abs(totals - totals[control])

    observed = largest(values)
    null = [
        largest(relabelled).max()
        for relabelled in itertools.product(*(itertools.permutations(row) for row in values))
    ]
    expected = [(np.array(null) >= one - 1e-9).mean() for one in observed]
    found = max_t_p_values(values, weights, control=control)
    others = [i for i in range(3) if i != control]
    assert np.isnan(found[control])
    assert found[others] == pytest.approx([expected[i] for i in others])


def test_one_treatment_at_once_is_its_swap_test_and_several_share_the_scale_of_all():
    rng = np.random.default_rng(1)
    beta_index = np.array([0, 0, 0, 1, 1])
    scale = np.where(beta_index == 0, 1.0, 9.0)[:, None]
    kl, reward = rng.uniform(1, 2, size=(5, 3)), scale * rng.normal(size=(5, 3))
    first, second = (pairs_of(kl[:, [i, 0]], reward[:, [i, 0]], beta_index=beta_index) for i in (1, 2))
    alone = objective_max_t([first])

    def scaled(values):
        spread = np.array([values[beta_index == one].std() for one in beta_index])
        return values / spread[:, None]

    values = scaled(objective(first))
    values = values[:, 0] - values[:, 1]
    flips = np.array(list(itertools.product((1, -1), repeat=5))) @ values
    assert alone == pytest.approx([(np.abs(flips) >= abs(values.sum()) - 1e-9).mean()])
    columns = np.column_stack([objective(first)[:, ::-1], objective(second)[:, 0]])
    expected = max_t_p_values(scaled(columns), np.ones(5))[1:]
    assert objective_max_t([first, second]) == pytest.approx(expected)
    lost = pairs_of(
        kl[:, [2, 0]], np.where(np.eye(5, 2) > 0, np.nan, reward[:, [2, 0]]), beta_index=beta_index
    )
    assert objective_max_t([first, lost]) is None
