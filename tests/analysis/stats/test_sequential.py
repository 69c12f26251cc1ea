"""The e-process of matched pairs."""

import itertools

import numpy as np
from designs import draw_pairs, pairs_of

from analysis.stats import Rules
from analysis.stats.decision import Decision
from analysis.stats.objective import objective
from analysis.stats.primary import primary_verdicts
from analysis.stats.sequential import evidence_of, swap_e_process
from analysis.stats.verdict import Outcome


def evidence(pairs, threshold, added=None):
    return evidence_of(pairs, objective(pairs), threshold, added)


SIGNS = np.array(list(itertools.product((1, -1), repeat=6)))


def test_the_e_process_is_a_martingale_and_keeps_its_level():
    sizes = np.array([1.0, 0.5, 2.0, 0.0, 1.5, 0.7])
    paths = np.array([swap_e_process(signs * sizes) for signs in SIGNS])
    assert np.allclose(paths.mean(0), 1)
    rng = np.random.default_rng(4)
    reached = [swap_e_process(rng.normal(size=60)).max() >= 20 for _ in range(400)]
    assert np.mean(reached) <= 0.05
    assert swap_e_process(np.full(40, 1.0))[-1] > 20


def test_pairs_are_in_the_order_of_their_runs_and_blocks_count_once():
    pairs = draw_pairs(np.random.default_rng(0), replicates=3, betas=(0.1, 0.3))
    differences = objective(pairs)[:, 0] - objective(pairs)[:, 1]
    order = sorted(range(6), key=lambda i: (pairs.replicate[i], pairs.beta_index[i]))
    found = evidence(pairs, 20.0)
    assert np.array_equal(found.differences, differences[order])
    assert np.array_equal(found.values, swap_e_process(differences[order]))
    shared = draw_pairs(np.random.default_rng(0), replicates=3, betas=(0.1, 0.3), seeds_shared=True)
    expected = [differences[pairs.replicate == replicate].sum() for replicate in range(3)]
    assert np.allclose(evidence(shared, 20.0).differences, expected)


def test_a_diverged_run_loses_by_the_largest_earlier_difference():
    reward = [[1.0, 0.5], [np.nan, 1.0], [np.nan, np.nan], [2.0, np.nan]]
    found = evidence(pairs_of(np.ones((4, 2)), reward), 20.0)
    assert found.differences.tolist() == [0.5, -0.5, 0.0, 0.5]
    assert np.isfinite(found.values).all()


def test_the_crossing_is_the_first_one():
    for sign in (1.0, -1.0):
        pairs = pairs_of(np.ones((9, 2)), [[sign, 0.0]] * 9)
        found = evidence(pairs, 2.0)
        assert found.crossing == int(np.argmax(found.values >= 2)) + 1
        assert found.favours_treatment == (sign > 0)
        assert evidence(pairs, 1e9).crossing is None


def test_one_large_loss_after_many_wins_does_not_reverse_the_evidence():
    found = evidence(pairs_of(np.ones((12, 2)), [[1.0, 0.0]] * 11 + [[-99.0, 0.0]]), 2.0)
    assert found.differences.sum() < 0
    assert found.favours_treatment


def test_pairs_added_after_results_come_after_earlier_pairs():
    pairs = draw_pairs(np.random.default_rng(0), replicates=2, betas=(0.1, 0.3))
    added = np.array([0, 1, 0, 1])  # the second replicate came later
    found = evidence(pairs, 20.0, 1 - added)
    differences = objective(pairs)[:, 0] - objective(pairs)[:, 1]
    assert np.array_equal(found.differences, differences[[1, 3, 0, 2]])


def test_an_arm_that_is_ahead_more_often_but_has_the_lower_mean_is_not_better():
    rewards = [[0.1, 0.0]] * 30 + [[-9.0, 0.0]]
    for sign, outcome in ((1.0, Outcome.BETTER), (-1.0, Outcome.WORSE)):
        pairs, good = (
            pairs_of(np.ones((31, 2)), sign * np.array(each)) for each in (rewards, rewards[:1] * 31)
        )
        (verdict,) = primary_verdicts([pairs], Rules())
        decision = Decision(verdict, evidence(pairs, 20.0), "the plan is sequential")
        assert decision.outcome is Outcome.INCONCLUSIVE
        assert "ahead more often, but the mean favours" in decision.headline
        (verdict,) = primary_verdicts([good], Rules())
        assert Decision(verdict, evidence(good, 20.0), "the plan is sequential").outcome is outcome
