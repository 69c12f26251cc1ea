"""Inference over blocks, against scipy and simulations with a known truth."""

from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, pairs_of
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from analysis.stats import Outcome, Rules, compare
from analysis.stats.claims import OBJECTIVE
from analysis.stats.contrast import NULLS, block_means, mean_of, most_unseen, objective_contrast, rejections
from analysis.stats.pairs import Pairs
from analysis.stats.power import detectable_over_blocks
from analysis.stats.scenario import STANDARD
from analysis.stats.verdict import Verdict


def blocked(seed: int = 0, *, blocks: int = 4, replicates: int = 12, tau: float = 0.0, **design) -> Pairs:
    """Pairs whose difference in reward has an effect of each block, with SD `tau`."""
    rng = np.random.default_rng(seed)
    pairs = replace(draw_pairs(rng, replicates=replicates, **design), blocks=tuple(range(blocks)))
    reward = pairs.reward.copy()
    reward[:, 0] += tau * rng.normal(size=blocks)[pairs.block]
    return replace(pairs, reward=reward)


def by_hand(pairs: Pairs) -> np.ndarray:
    """The mean of each block's means at each beta."""
    differences = objective_contrast(pairs).values

    def at(block, beta):
        return differences[(pairs.replicate % len(pairs.blocks) == block) & (pairs.beta_index == beta)].mean()

    return np.array([np.mean([at(block, beta) for beta in range(3)]) for block in pairs.blocks])


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


def test_blocks_of_equal_weights_are_one_and_those_without_pairs_are_none():
    pairs, three = blocked(blocks=4, lift=2.0), blocked(blocks=3)
    for left, words in (
        (replace(pairs, blocks=(0, 0, 2, 2)), "on these two blocks"),
        (replace(pairs, blocks=(0, 0, 0, 0)), "on this one block"),
        (three.subset(three.block < 2), "on these two blocks"),
    ):
        (found,) = compare([left], Rules(comparisons=1))
        assert not found.primary.over_blocks
        assert words in found.primary.sentence


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


def test_the_t_test_keeps_its_level_unless_blocks_are_skewed_or_collapse():
    """Three blocks have no collapse to see in .73 of the sweeps, and eight in .43."""
    for blocks in (3, 8):
        found = {name: sum(sides) for name, sides in rejections(blocks, 0.05).items()}
        assert max(found[name] for name in [*found][:3]) < 0.06
        assert min(found[name] for name in [*found][3:]) > 0.12
    assert rejections(8, 0.05)[[*NULLS][-1]][0] == pytest.approx(0.9**8, abs=0.03)


@pytest.mark.parametrize("blocks", [4, 8, 12])
def test_what_a_pilot_over_blocks_promises_is_kept_on_average(blocks):
    """With the pilot's SD taken as known, the power is .63, .71 and .74."""
    rng, sweeps = np.random.default_rng(blocks), 4_000
    pilot = rng.normal(size=(sweeps, blocks))
    reward = np.stack([pilot[0], np.zeros(blocks)], axis=1)
    pairs = replace(pairs_of(np.ones((blocks, 2)), reward), blocks=tuple(range(blocks)))
    planned = replace(STANDARD, betas=(1.0,), log_kl=(0.0,), replicates=blocks)
    ((spread, reach),) = detectable_over_blocks(planned, blocks, 0.05, pairs).items()
    assert spread == pytest.approx(pilot[0].std(ddof=1))
    promised = pilot.std(axis=1, ddof=1) * reach / spread  # the reach is in proportion to the pilot's SD
    means = promised[:, None] + rng.normal(size=(sweeps, blocks))
    rejected = stats.ttest_1samp(means, 0.0, axis=1).pvalue <= 0.05
    assert rejected.mean() == pytest.approx(0.8, abs=0.025)


def test_two_blocks_have_swaps_of_pairs_and_their_variance_within_blocks():
    pairs = blocked(blocks=2, replicates=8, tau=0.5, lift=30.0, seed=3)
    (found,) = compare([pairs], Rules(comparisons=1))
    (ignored,) = compare([replace(pairs, blocks=())], Rules(comparisons=1))
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


def test_what_is_not_a_mean_of_pairs_pools_them_and_says_so():
    (found,) = compare([blocked(lift=5.0)], Rules(comparisons=1, corner=(20.0, 0.0)))
    assert "on these 4 blocks" in found.matched.sentence
    over = {verdict.claim.key for verdict in found.secondary if verdict.over_blocks}
    assert over == {"kl", "reward"}


def test_ranks_that_agree_in_all_blocks_are_no_proof():
    """A diverged run leaves ranks, whose differences here have the same mean in every block."""
    kl, reward = np.ones((3, 2)), np.array([[0.0, np.nan], [2.0, 1.0], [4.0, 3.0]])
    place = np.zeros(3, dtype=int), np.arange(3), np.arange(3)
    pairs = Pairs(
        "A", "B", np.ones(3), *place, np.where(np.isnan(reward), np.nan, kl), reward, blocks=(0, 1, 2)
    )
    verdict = Verdict.on(OBJECTIVE, pairs, objective_contrast(pairs))
    assert verdict.test.p_value == 0.25  # the smallest of 8 swaps
    assert "on these 3 blocks" in verdict.sentence


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_is_detected_over_blocks_is_so_in_four_of_five_sweeps(count):
    scenario = replace(STANDARD, replicates=6)
    spread, reach = [*detectable_over_blocks(scenario, 3, 0.05).items()][count]
    error = np.sqrt(2 * (1 - scenario.correlation)) * scenario.reward_sd  # nearly: KLs add little
    assert spread == pytest.approx(count * error, rel=0.1)
    rng = np.random.default_rng(0)
    variance = spread**2 + error**2 / (len(scenario.betas) * 2)
    means = reach + np.sqrt(variance) * rng.normal(size=(4_000, 3))
    rejected = stats.ttest_1samp(means, 0.0, axis=1).pvalue <= 0.05
    assert rejected.mean() == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("outcome", ["objective", "kl"])
def test_a_pilot_gives_the_spread_of_its_own_differences(outcome):
    """A curve of reward against KL would give more: here each KL is paid for by the reward of its run."""
    pairs = draw_pairs(np.random.default_rng(0), replicates=40)
    reward = pairs.beta[:, None] * pairs.kl + 0.1 * np.random.default_rng(1).normal(size=pairs.kl.shape)
    reward[3, 0], diverged = np.nan, 3  # its difference is no part of the spread
    pairs = replace(pairs, reward=reward)
    contrast = pairs.kl if outcome == "kl" else reward - pairs.beta[:, None] * pairs.kl
    differences = np.delete(contrast[:, 0] - contrast[:, 1], diverged)
    planned = replace(STANDARD, replicates=10, outcome=outcome)
    spreads = [*detectable_over_blocks(planned, 5, 0.05, pairs)]
    strata = np.delete(pairs.beta_index, diverged)
    variances = [differences[strata == index].var(ddof=1) / (strata == index).sum() for index in range(3)]
    error = np.sqrt(np.sum(variances)) / 3 * np.sqrt(40 / 10)
    assert spreads == pytest.approx([count * error * np.sqrt(planned.pairs) for count in range(3)])


def test_each_block_has_the_interval_of_its_own_pairs():
    pairs = blocked(tau=0.1, betas=(0.1,))
    for block, mean in block_means(objective_contrast(pairs), pairs).items():
        own = objective_contrast(pairs).values[pairs.replicate % 4 == block]
        ends = stats.ttest_1samp(own, 0.0).confidence_interval(0.95)
        assert (mean.interval().low, mean.interval().high) == pytest.approx((ends.low, ends.high))


def test_only_intervals_over_blocks_cover_a_difference_that_varies_between_them():
    """docs/sweeps.md has these numbers. Within a block, the SD of a pair's difference is .135."""
    over, ignoring, sweeps = 0, 0, 400
    for seed in range(sweeps):
        pairs = blocked(seed, tau=0.27, betas=(0.1, 0.2))
        for_blocks = mean_of(objective_contrast(pairs), pairs).interval()
        plain = mean_of(objective_contrast(pairs), replace(pairs, blocks=())).interval()
        over += for_blocks.low <= 0 <= for_blocks.high
        ignoring += plain.low <= 0 <= plain.high
    assert over / sweeps == pytest.approx(0.95, abs=0.03)
    assert ignoring / sweeps == pytest.approx(0.52, abs=0.03)
