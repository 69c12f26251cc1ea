"""The interval over seeds and prompts: its coverage, and gains over the start."""

from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, pairs_of
from scipy import stats

from analysis.stats import Rules, compare
from analysis.stats.contrast import mean_of, objective_contrast
from analysis.stats.prompts import over_prompts


def drawn(rng, seeds, prompts, *, of_seed, of_prompt, noise, blocks=0):
    """Differences of mean 0 with effects of seeds and of prompts, as pairs of one beta."""
    size = (seeds, prompts)
    found = of_seed * rng.normal(size=(seeds, 1)) + of_prompt * rng.normal(size=prompts)
    found = found + noise * rng.normal(size=size)
    reward = np.stack([found.mean(axis=1), np.zeros(seeds)], axis=1)
    return pairs_of(np.zeros((seeds, 2)), reward, prompts=found, blocks=blocks)


def intervals(pairs):
    """The 95 % intervals over seeds, and over seeds and prompts."""
    contrast = objective_contrast(pairs)
    mean = mean_of(contrast, pairs)
    return mean.interval(), over_prompts(mean, contrast, pairs).interval()


CASES = {
    "seeds alone": {"of_seed": 1.0, "of_prompt": 0.0, "noise": 1.0},
    "prompts as much": {"of_seed": 0.35, "of_prompt": 1.0, "noise": 1.0},
    "prompts alone": {"of_seed": 0.0, "of_prompt": 1.0, "noise": 0.3},
}


@pytest.mark.parametrize(("case", "blocks"), [*((case, 0) for case in CASES), ("prompts as much", 8)])
def test_it_covers_the_difference_on_other_prompts_and_the_interval_over_seeds_does_not(case, blocks):
    rng, hits, over_seeds, sweeps = np.random.default_rng(0), 0, 0, 1_000
    for _ in range(sweeps):
        seeds, both = intervals(drawn(rng, 8, 24, **CASES[case], blocks=blocks))
        hits += both.low <= 0 <= both.high
        over_seeds += seeds.low <= 0 <= seeds.high
    assert 0.935 < hits / sweeps < 0.985
    assert (over_seeds / sweeps < 0.8) == (case != "seeds alone")


def test_its_variance_is_that_of_random_seeds_and_random_prompts():
    """By mean squares of a two-way analysis of variance, in which the noise of both is counted once."""
    pairs = drawn(np.random.default_rng(1), 5, 7, of_seed=1.0, of_prompt=1.0, noise=1.0)
    values, contrast = pairs.prompts, objective_contrast(pairs)
    rows, columns = values.mean(axis=1), values.mean(axis=0)
    residuals = values - rows[:, None] - columns + values.mean()
    squares = 7 * rows.var(ddof=1) + 5 * columns.var(ddof=1) - (residuals**2).sum() / (4 * 6)
    found = over_prompts(mean_of(contrast, pairs), contrast, pairs)
    assert found.standard_error**2 == pytest.approx(squares / 35)


def test_without_seeds_it_is_the_t_interval_over_prompts():
    values = np.random.default_rng(1).normal(size=(1, 40)) + np.zeros((6, 1))
    pairs = drawn(np.random.default_rng(0), 6, 40, of_seed=0, of_prompt=0, noise=0)
    reward = np.stack([values.mean(axis=1) + 1e-4 * np.arange(6), np.zeros(6)], axis=1)
    (found,) = compare([replace(pairs, prompts=values, reward=reward)], Rules())
    expected = stats.ttest_1samp(values[0], 0.0).confidence_interval(0.95)
    assert np.diff(found.primary.over_prompts.interval().ends) == pytest.approx(np.diff(expected), rel=1e-3)


def test_several_betas_share_their_prompts():
    """Means over betas of each prompt vary as the prompts do, and not as so many more of them."""
    rng, hits, sweeps = np.random.default_rng(3), 0, 600
    for _ in range(sweeps):
        pairs, of_prompt = draw_pairs(rng, replicates=4), rng.normal(size=24)
        values = of_prompt + 0.3 * rng.normal(size=(len(pairs), 1)) + rng.normal(size=(len(pairs), 24))
        reward = pairs.beta[:, None] * pairs.kl + np.stack(
            [values.mean(axis=1), np.zeros(len(pairs))], axis=1
        )
        _, both = intervals(replace(pairs, reward=reward, prompts=values))
        hits += both.low <= 0 <= both.high
    assert 0.93 < hits / sweeps < 0.985


def test_without_values_of_every_pair_there_is_none():
    pairs = drawn(np.random.default_rng(0), 4, 24, **CASES["prompts alone"])
    assert compare([replace(pairs, prompts=None)], Rules())[0].primary.over_prompts is None
    pairs.prompts[2] = np.nan
    assert compare([pairs], Rules())[0].primary.over_prompts is None


@pytest.mark.parametrize("blocks", [0, 4])
def test_the_gain_of_the_control_has_the_units_of_the_difference(blocks):
    pairs = replace(draw_pairs(np.random.default_rng(0), replicates=8), blocks=blocks)
    gain = 1 + 0.3 * np.random.default_rng(1).normal(size=len(pairs))
    (found,) = compare([replace(pairs, gain=gain)], Rules())
    contrast = replace(objective_contrast(pairs), values=gain)
    assert found.primary.gain == mean_of(contrast, pairs)
    if blocks:
        means = [gain[pairs.block == block].mean() for block in range(blocks)]
        assert found.primary.gain.interval().ends == pytest.approx(
            [*stats.ttest_1samp(means, 0.0).confidence_interval(0.95)]
        )
    gain[3] = np.nan
    assert compare([replace(pairs, gain=gain)], Rules())[0].primary.gain is None
