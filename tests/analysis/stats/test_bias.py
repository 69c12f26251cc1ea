"""Bias as equivalence, against scipy, and with heavy tails."""

import numpy as np
import pytest
from scipy import stats

from analysis.stats.kl_values import BiasOutcome, reference_bias, tail_index


def test_the_bias_equals_scipys_two_one_sided_tests_of_paired_differences():
    rng = np.random.default_rng(0)
    reference = rng.normal(2.0, 0.5, size=50)
    values = reference + rng.normal(0.0, 0.1, size=50)
    found = reference_bias(values, reference, tolerance=0.05)
    margin = 0.05 * reference.mean()
    lower = stats.ttest_1samp(values - reference, -margin, alternative="greater").pvalue
    upper = stats.ttest_1samp(values - reference, margin, alternative="less").pvalue
    equivalence = found.estimate.interval(1 - 2 * max(lower, upper))
    assert max(map(abs, equivalence.ends)) == pytest.approx(margin)
    assert found.difference_p == pytest.approx(stats.ttest_rel(values, reference).pvalue)
    assert found.outcome is BiasOutcome.EQUIVALENT
    assert reference_bias(values + 1, reference).outcome is BiasOutcome.BIASED
    few = reference_bias(values[:3], reference[:3], tolerance=1e-4)
    assert few.outcome is BiasOutcome.INCONCLUSIVE


@pytest.mark.parametrize(("shift", "outcome"), [(0.0, BiasOutcome.EQUIVALENT), (1.0, BiasOutcome.BIASED)])
def test_a_bias_without_spread_is_known_exactly(shift, outcome):
    reference = np.linspace(1.0, 2.0, 9)
    assert reference_bias(reference + shift, reference).outcome is outcome


def test_a_heavy_tailed_mean_is_inconclusive():
    # exp(-R) has mean 1 under R ~ N(18, 36): of a thousand draws nearly all are near 0, and say otherwise.
    rng = np.random.default_rng(0)
    exact = np.full(1000, 18.0)
    found = [reference_bias(np.expm1(-rng.normal(18.0, 6.0, size=1000)) + exact, exact) for _ in range(20)]
    assert sum(one.estimate.value < -0.9 and one.difference_p < 1e-3 for one in found) > 10
    assert {one.outcome for one in found} == {BiasOutcome.INCONCLUSIVE}


@pytest.mark.parametrize("shape", [0.2, 1.0])
def test_the_tail_index_is_that_of_known_distributions(shape):
    draws = [stats.genpareto.rvs(shape, size=20_000, random_state=seed) for seed in range(8)]
    found = [tail_index(side * values) for values in draws for side in (-1.0, 1.0)]
    assert np.mean(found) == pytest.approx(shape, abs=0.06)
    assert np.isnan(tail_index(draws[0][:99]))
