"""Inference over blocks, against scipy and simulations with a known truth."""

from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, pairs_of
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from analysis.stats import Outcome, Rules, compare
from analysis.stats.claims import OBJECTIVE
from analysis.stats.contrast import block_means, mean_of, most_unseen, objective_contrast
from analysis.stats.pairs import Pairs
from analysis.stats.swaps import mean_swap_test
from analysis.stats.verdict import Verdict


def blocked(seed: int = 0, *, blocks: int = 4, replicates: int = 12, tau: float = 0.0, **design) -> Pairs:
    """Pairs whose difference in reward has an effect of each block, with SD `tau`."""
    rng = np.random.default_rng(seed)
    pairs = replace(draw_pairs(rng, replicates=replicates, **design), blocks=blocks)
    reward = pairs.reward.copy()
    reward[:, 0] += tau * rng.normal(size=blocks)[pairs.block]
    return replace(pairs, reward=reward)


def by_hand(pairs: Pairs) -> np.ndarray:
    """The mean of each block's means at each beta."""
    differences = objective_contrast(pairs).values

    def at(block, beta):
        return differences[(pairs.replicate % pairs.blocks == block) & (pairs.beta_index == beta)].mean()

    return np.array([np.mean([at(block, beta) for beta in range(3)]) for block in range(pairs.blocks)])


@pytest.mark.parametrize("blocks", [3, 4, 6])
def test_estimate_interval_and_p_are_those_of_a_t_test_of_block_means(blocks):
    pairs = blocked(blocks=blocks, tau=0.1, lift=2.0)
    (found,) = compare([pairs], Rules(comparisons=1))
    verdict, expected = found.primary, stats.ttest_1samp(by_hand(pairs), 0.0)
    assert verdict.estimate.value == pytest.approx(by_hand(pairs).mean())
    assert verdict.test.p_value == pytest.approx(expected.pvalue)
    ends = expected.confidence_interval(0.95)
    assert (verdict.interval.low, verdict.interval.high) == pytest.approx((ends.low, ends.high))
    text = verdict.sentence.replace("\u00a0", " ")
    assert f"t test over {blocks} blocks, p =" in text
    assert f"n = {blocks} blocks of 12 replicates in all" in text
    assert found.primary.over_blocks


def test_a_lost_pair_leaves_each_beta_its_weight_in_its_block():
    pairs = blocked(tau=0.1)
    kept = pairs.subset(np.arange(len(pairs)) != 5)
    assert mean_of(objective_contrast(kept), kept).value == pytest.approx(by_hand(kept).mean())


def test_the_correction_is_that_of_other_tests():
    one, other = (replace(blocked(seed, lift=3.0), treatment=name) for seed, name in ((1, "A"), (2, "B")))
    found = [comparison.primary for comparison in compare([one, other], Rules(comparisons=2))]
    least = min(verdict.test.p_value for verdict in found)
    assert min(verdict.adjusted for verdict in found) == pytest.approx(2 * least)


def test_a_lost_block_leaves_too_few():
    three = blocked(blocks=3)
    (found,) = compare([three.subset(three.block < 2)], Rules(comparisons=1))
    assert not found.primary.over_blocks
    assert "on these two blocks" in found.primary.sentence


def test_eight_differences_have_one_verdict_whether_they_are_called_blocks_or_pairs():
    """As pairs they were swapped: 'better' became 'inconclusive'. The other test stands beside it."""
    rng, disagreements = np.random.default_rng(0), 0
    for _ in range(80):
        pairs = pairs_of(np.ones((8, 2)), rng.normal(0.4, 0.5, size=(8, 1)) * np.array([1.0, 0.0]))
        plain, over = (compare([one], Rules())[0].primary for one in (pairs, replace(pairs, blocks=8)))
        assert plain.outcome is over.outcome
        assert (
            plain.test.p_value == over.test.p_value == pytest.approx(stats.ttest_rel(*pairs.reward.T).pvalue)
        )
        assert plain.beside.p_value == over.beside.p_value
        assert plain.beside.p_value == mean_swap_test(pairs.reward[:, 0]).p_value
        told = "The swap test of the same differences" in plain.sentence
        assert told == ((plain.test.p_value <= 0.05) != (plain.beside.p_value <= 0.05))
        disagreements += told
    assert disagreements


def test_a_diverged_run_does_not_replace_the_t_test_by_ranks():
    pairs = blocked(lift=5.0)
    assert compare([pairs], Rules())[0].primary.outcome is Outcome.BETTER
    pairs.kl[0, 1] = np.nan
    (found,) = compare([pairs], Rules())
    assert found.primary.outcome is Outcome.INCONCLUSIVE
    assert "ranks do not take the place of the planned t test" in found.primary.sentence


def test_the_share_that_may_be_unseen_is_clopper_and_pearsons():
    for blocks in (3, 8):
        assert most_unseen(blocks) == pytest.approx(proportion_confint(0, blocks, method="beta")[1])


def test_two_blocks_have_swaps_of_pairs_and_their_variance_within_blocks():
    pairs = blocked(blocks=2, replicates=8, tau=0.5, lift=30.0, seed=3)
    (found,) = compare([pairs], Rules(comparisons=1))
    (ignored,) = compare([replace(pairs, blocks=0)], Rules(comparisons=1))
    verdict, plain = found.primary, ignored.primary
    assert verdict.test == plain.test
    assert verdict.estimate.value == pytest.approx(plain.estimate.value)
    differences, variance = objective_contrast(pairs).values, 0.0
    for beta in range(3):
        for block in range(2):
            own = differences[(pairs.beta_index == beta) & (pairs.replicate % 2 == block)]
            variance += own.var(ddof=1) / len(own) / 36
    assert verdict.estimate.standard_error == pytest.approx(np.sqrt(variance))
    assert plain.estimate.standard_error > 1.5 * verdict.estimate.standard_error
    assert found.primary.outcome is Outcome.BETTER
    assert "8 replicates on these two blocks" in verdict.sentence


def test_ranks_that_agree_in_all_blocks_are_no_proof():
    """A diverged run leaves ranks, whose differences here have the same mean in every block."""
    kl, reward = np.ones((3, 2)), np.array([[0.0, np.nan], [2.0, 1.0], [4.0, 3.0]])
    place = np.zeros(3, dtype=int), np.arange(3), np.arange(3)
    pairs = Pairs("A", "B", np.ones(3), *place, np.where(np.isnan(reward), np.nan, kl), reward, blocks=3)
    verdict = Verdict.on(OBJECTIVE, pairs, objective_contrast(pairs))
    assert verdict.test.p_value == 0.25  # the smallest of 8 swaps
    assert "on these 3 blocks" in verdict.sentence


def test_each_block_has_the_interval_of_its_own_pairs():
    pairs = blocked(tau=0.1, betas=(0.1,))
    for block, mean in block_means(objective_contrast(pairs), pairs).items():
        own = objective_contrast(pairs).values[pairs.replicate % 4 == block]
        ends = stats.ttest_1samp(own, 0.0).confidence_interval(0.95)
        assert (mean.interval().low, mean.interval().high) == pytest.approx((ends.low, ends.high))


def test_only_intervals_over_blocks_cover_a_difference_that_varies_between_them():
    """docs/compare.md has these numbers. Within a block, the SD of a pair's difference is .135."""
    over, ignoring, sweeps = 0, 0, 400
    for seed in range(sweeps):
        pairs = blocked(seed, tau=0.27, betas=(0.1, 0.2))
        for_blocks = mean_of(objective_contrast(pairs), pairs).interval()
        plain = mean_of(objective_contrast(pairs), replace(pairs, blocks=0)).interval()
        over += for_blocks.low <= 0 <= for_blocks.high
        ignoring += plain.low <= 0 <= plain.high
    assert over / sweeps == pytest.approx(0.95, abs=0.03)
    assert ignoring / sweeps == pytest.approx(0.52, abs=0.03)
