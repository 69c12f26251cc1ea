"""The share of evaluation noise: against an analysis of variance, and where the truth is known."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from scipy import stats
from statsmodels.stats.anova import anova_lm
from synthetic import write_sweep

from analysis.checks import load_sweep
from analysis.report.matching import match
from analysis.stats.prompts import noise_share

PROMPTS = 12
# Standard deviation of a pair's difference over runs and over prompts, by beta; the shares are 0.8 and 0.2.
SPREADS = {0.1: (0.5, np.sqrt(PROMPTS)), 0.3: (2.0, np.sqrt(PROMPTS))}


def draw(rng, pairs, runs, noise):
    """Differences whose part that all pairs share is large."""
    shared = 3 * rng.normal(size=PROMPTS)
    return 1 + runs * rng.normal(size=(pairs, 1)) + shared + noise * rng.normal(size=(pairs, PROMPTS))


def test_at_one_beta_it_is_the_reciprocal_of_the_f_of_a_two_way_analysis_of_variance():
    values = draw(np.random.default_rng(0), 4, 0.5, 1.0)
    pair, prompt = np.indices(values.shape)
    frame = pd.DataFrame({"d": values.ravel(), "pair": pair.ravel(), "prompt": prompt.ravel()})
    table = anova_lm(smf.ols("d ~ C(pair) + C(prompt)", frame).fit())
    found = noise_share([values])
    assert found.value == pytest.approx(1 / table.F["C(pair)"], rel=1e-9)
    ends = found.value * stats.f.ppf([0.025, 0.975], 3, 3 * (PROMPTS - 1))
    assert found.interval.ends == pytest.approx(np.minimum(1.0, ends))


def test_with_many_pairs_it_is_the_known_share_at_each_beta_and_over_all():
    rng = np.random.default_rng(1)
    values = [draw(rng, 4000, *spread) for spread in SPREADS.values()]
    shares = [noise_share([one]).value for one in values]
    assert shares == pytest.approx([1 / 1.25, 1 / 5], rel=0.06)
    assert noise_share(values).value == pytest.approx(2 / 6.25, rel=0.06)


def test_its_interval_has_its_coverage():
    rng = np.random.default_rng(2)
    found = [noise_share([draw(rng, 5, *spread) for spread in SPREADS.values()]) for _ in range(600)]
    covered = np.mean([one.interval.low <= 2 / 6.25 <= one.interval.high for one in found])
    assert 0.93 < covered < 0.99
    assert all(0 < one.interval.low < one.value <= 1 for one in found)


def test_the_extremes():
    runs = np.arange(4.0)[:, None] * np.ones(PROMPTS)
    assert noise_share([runs]).value == noise_share([runs]).interval.high == 0
    assert noise_share([np.ones((4, PROMPTS))]) is None
    assert noise_share([]) is None
    assert noise_share([np.arange(4.0)[None], np.arange(4.0)[:, None]]) is None
    crossed = np.array([[1.0, -1.0, 1.0], [0.9, 1.0, -1.0]])
    assert noise_share([crossed]).value == noise_share([crossed]).interval.high == 1


def per_prompt(rng):
    """An edit for `write_sweep`: values per prompt, and final metrics that are their means."""

    def edit(point, made):
        kl, reward = rng.normal(5, 1, PROMPTS).round(3), rng.normal(2, 1, PROMPTS).round(3)
        final = {"reward": reward.mean(), "kl": kl.mean()}
        return {**made, "final": final, "prompts": {"reward": reward.tolist(), "kl": kl.tolist()}}

    return edit


@pytest.mark.parametrize("outcome", ["objective", "kl"])
def test_a_sweep_gives_the_differences_of_its_pairs_in_what_decides(tmp_path, outcome):
    edit = per_prompt(np.random.default_rng(3))
    sweep = load_sweep(write_sweep(tmp_path, replicates=3, primary={"outcome": outcome}, edit=edit))
    assert not sweep.problems
    pairs = match(sweep, "RaoBlackwell", "MonteCarlo")
    assert pairs.prompts.shape == (9, PROMPTS)
    column = pairs.kl if outcome == "kl" else pairs.reward - pairs.beta[:, None] * pairs.kl
    np.testing.assert_allclose(pairs.prompts.mean(axis=1), column[:, 0] - column[:, 1], atol=1e-12)


def test_diverged_pairs_are_left_out_and_without_values_or_the_same_prompts_there_is_nothing(tmp_path):
    def found(name, change, told=True):
        drawn = per_prompt(np.random.default_rng(4))

        def edit(point, made):
            return change(drawn(point, made)) if point == ("RaoBlackwell", 1, 0) else drawn(point, made)

        sweep = load_sweep(write_sweep(tmp_path / name, replicates=3, edit=edit))
        other = ["the runs have values of different numbers of prompts"] if told else []
        assert [one.text.partition(":")[0] for one in sweep.problems] == other
        return match(sweep, "RaoBlackwell", "MonteCarlo").prompts

    lost = {"state": "diverged", "final": {"reward": None, "kl": None}}
    diverged = found("diverged", lambda made: made | lost, told=False)
    assert np.isnan(diverged).all(axis=1).tolist() == [False] * 3 + [True] + [False] * 5
    assert found("old", lambda made: {k: v for k, v in made.items() if k != "prompts"}) is None
    other = {"final": {"reward": 1.0, "kl": 1.0}, "prompts": {"reward": [1.0], "kl": [1.0]}}
    assert found("other", lambda made: made | other) is None
