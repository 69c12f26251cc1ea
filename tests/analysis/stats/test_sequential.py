"""Evidence pair by pair."""

import itertools

import numpy as np
from designs import draw_pairs, pairs_of

from analysis.stats.objective import objective
from analysis.stats.sequential import evidence_of, swap_e_process


def evidence(pairs, threshold, added=None):
    return evidence_of(pairs, objective(pairs), threshold, added)


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
    found = evidence(pairs, 20.0)
    assert np.array_equal(found.differences, differences[order])
    assert np.array_equal(found.values, swap_e_process(differences[order]))
    blocked = draw_pairs(np.random.default_rng(0), replicates=3, betas=(0.1, 0.3), blocked=True)
    expected = [differences[pairs.replicate == replicate].sum() for replicate in range(3)]
    assert np.allclose(evidence(blocked, 20.0).differences, expected)


def test_a_diverged_run_loses_by_as_much_as_any_pair_before_and_two_lose_nothing():
    reward = [[1.0, 0.5], [np.nan, 1.0], [np.nan, np.nan], [2.0, np.nan]]
    found = evidence(pairs_of(np.ones((4, 2)), reward), 20.0)
    assert found.differences.tolist() == [0.5, -0.5, 0.0, 0.5]
    assert np.isfinite(found.values).all()


def test_a_crossing_is_the_first():
    for sign in (1.0, -1.0):
        pairs = pairs_of(np.ones((9, 2)), [[sign, 0.0]] * 9)
        found = evidence(pairs, 2.0)
        assert found.crossing == int(np.argmax(found.values >= 2)) + 1
        assert found.favours_treatment == (sign > 0)
        assert evidence(pairs, 1e9).crossing is None


def test_one_large_loss_after_many_wins_does_not_turn_the_evidence():
    found = evidence(pairs_of(np.ones((12, 2)), [[1.0, 0.0]] * 11 + [[-99.0, 0.0]]), 2.0)
    assert found.differences.sum() < 0
    assert found.favours_treatment


def test_what_was_added_after_a_look_comes_after_what_was_looked_at():
    pairs = draw_pairs(np.random.default_rng(0), replicates=2, betas=(0.1, 0.3))
    added = np.array([0, 1, 0, 1])  # the second replicate came later
    found = evidence(pairs, 20.0, 1 - added)
    differences = objective(pairs)[:, 0] - objective(pairs)[:, 1]
    assert np.array_equal(found.differences, differences[[1, 3, 0, 2]])
