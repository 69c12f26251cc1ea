"""Simulated rates against the tests themselves, on the same simulated sweeps."""

from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, simulate
from scipy import stats

from analysis.stats.contrast import kl_contrast, mean_of, objective_contrast
from analysis.stats.power import (
    detectable_difference,
    detectable_ratio,
    expected_detectable,
    primary_rate,
    replicates_needed,
)
from analysis.stats.scenario import STANDARD, Scenario, scenario_of
from analysis.stats.swaps import swap_test

SMALL = Scenario((0.1, 0.2, 0.4), (1.0, 0.5, 0.0), 3, (0.0, 1.0), 0.15, 0.1)


@pytest.mark.parametrize("scenario", [SMALL, replace(SMALL, seeds_shared=True, cluster=0.5, replicates=7)])
@pytest.mark.parametrize("outcome", ["objective", "kl"])
def test_the_rate_equals_that_of_the_test_itself(scenario, outcome):
    scenario, sweeps = replace(scenario, outcome=outcome), 40
    drawn = list(map(scenario.pairs_of, *scenario.draw(np.random.default_rng(0), sweeps, lift=0.7)))
    contrast = kl_contrast if outcome == "kl" else objective_contrast
    tests = [swap_test((found := contrast(pairs)).values * found.weights, pairs.unit) for pairs in drawn]
    assert all(test.exact for test in tests)
    expected = np.mean([test.p_value <= 0.05 for test in tests])
    assert primary_rate(scenario, lift=0.7, sweeps=sweeps).value == pytest.approx(expected)
    assert 0 < expected < 1


def test_simulated_runs_have_the_given_spreads():
    kl, reward = SMALL.draw(np.random.default_rng(1), 4_000, lift=2.0, spread=1.5)
    logs = np.log(kl)[:, SMALL.beta_index == 1]
    assert logs.mean() == pytest.approx(0.5, abs=0.01)
    assert logs[..., 0].std() == pytest.approx(0.15, rel=0.05)
    left = (reward - np.sqrt(kl)).reshape(-1, 2)
    assert left.mean(axis=0) == pytest.approx([0.2, 0.0], abs=0.01)
    assert left.std(axis=0) == pytest.approx([0.1, 0.15], rel=0.05)
    assert np.corrcoef(left.T)[0, 1] == pytest.approx(0.3, abs=0.03)


def test_the_scenario_of_a_simulated_sweep_has_its_spreads():
    pairs = simulate(replace(STANDARD, replicates=60), np.random.default_rng(2), lift=3.0)
    found = scenario_of(pairs)
    assert found.reward_sd == pytest.approx(STANDARD.reward_sd, rel=0.1)
    assert found.log_kl_sd == pytest.approx(STANDARD.log_kl_sd, rel=0.1)
    assert found.correlation == pytest.approx(STANDARD.correlation, abs=0.1)
    assert found.log_kl == pytest.approx(STANDARD.log_kl, abs=0.1)


def test_the_replicates_needed_are_the_smallest_number_with_the_power(monkeypatch):
    grid = (3, 4, 6, 8, 12, 20)
    monkeypatch.setattr("analysis.stats.power.REPLICATES", grid)
    rates = [primary_rate(replace(SMALL, replicates=count), lift=1.0, sweeps=400).value for count in grid]
    expected = next(count for count, rate in zip(grid, rates, strict=True) if rate >= 0.8)
    assert replicates_needed(SMALL, 1.0) == expected
    assert replicates_needed(SMALL, 0.01) is None


def test_the_detectable_difference_is_that_of_the_pairs_and_shrinks_with_replicates():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    estimate = mean_of(objective_contrast(pairs), pairs)
    found = detectable_difference(pairs, 6, 0.0125)
    assert found == pytest.approx(estimate.detectable(0.0125))
    assert detectable_difference(pairs, 24, 0.0125) < found / 1.9
    assert expected_detectable(SMALL, 0.05) < expected_detectable(SMALL, 0.01)


BY_KL = Scenario((1.0,), (0.7,), 12, (0.0,), 0.05, 0.0, correlation=0.4, outcome="kl")


def test_the_power_for_a_ratio_of_kls_is_that_of_the_paired_t_test():
    """With a small spread the difference in KL is Gaussian, and the swap test nearly the t test."""
    error = BY_KL.log_kl_sd * np.sqrt(2 * (1 - BY_KL.correlation) / BY_KL.replicates)
    df, critical = BY_KL.replicates - 1, stats.t.ppf(0.975, BY_KL.replicates - 1)

    def expected(log_ratio, error=error, df=df, critical=critical):
        shift = log_ratio / error
        return stats.nct.sf(critical, df, shift) + stats.nct.cdf(-critical, df, shift)

    for lift in (0.0, 0.5, 1.0):
        found = primary_rate(BY_KL, lift=lift, alpha=0.05)
        assert found.value == pytest.approx(expected(-lift * BY_KL.log_kl_sd), abs=4 * found.error)
    ratio = detectable_ratio(BY_KL, 0.05)
    assert ratio < 1
    assert expected(np.log(ratio)) == pytest.approx(0.8, abs=0.05)
    assert detectable_ratio(replace(BY_KL, replicates=2), 0.05) is None
    assert detectable_ratio(replace(BY_KL, log_kl_sd=0.0), 0.05) is None


def test_the_scenario_of_a_sweep_that_the_kl_decides_has_its_spreads():
    truth = replace(STANDARD, replicates=80, correlation=0.6, seeds_shared=True, cluster=0.7, outcome="kl")
    drawn = simulate(truth, np.random.default_rng(3), lift=3.0)
    ratio = np.log(drawn.kl[:, 0] / drawn.kl[:, 1]).mean()
    assert ratio == pytest.approx(-3.0 * truth.log_kl_sd, rel=0.1)
    found = scenario_of(replace(drawn, reward=np.zeros_like(drawn.reward)), "kl")
    assert found.outcome == "kl"
    assert found.correlation < truth.correlation  # the cluster's effect is in one of the two runs
    plain = simulate(replace(truth, cluster=0.0, seeds_shared=False), np.random.default_rng(3))
    assert scenario_of(plain, "kl").correlation == pytest.approx(0.6, abs=0.05)
    assert scenario_of(plain, "kl").sd == pytest.approx(truth.log_kl_sd, rel=0.05)
    # SD of a replicate's mean difference: that of the cluster and of the pairs
    means = np.log(drawn.kl[:, 0] / drawn.kl[:, 1]).reshape(6, 80).mean(axis=0)
    implied = found.sd**2 * (found.cluster**2 + 2 * (1 - found.correlation) / 6)
    assert implied == pytest.approx(means.var(ddof=1), rel=0.02)
