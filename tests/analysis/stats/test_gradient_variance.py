"""Gradient variance and bias against numpy on the gradients themselves, and the sizes of their tests."""

import itertools

import numpy as np
import pytest
from generators import draw_gradients
from scipy import stats

from analysis.stats.bias import BiasOutcome, gradient_bias, reference_bias, tail_index, value_bias
from analysis.stats.gradient_variance import (
    compare_gradient_variance,
    disjoint_differences,
    squared_distances,
)


def pair(batches, seed=0, dimension=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batches, dimension)) * 2, rng.normal(size=(batches, dimension)) + 1


def gram_of(treatment, control):
    stacked = np.concatenate([treatment, control])
    return stacked @ stacked.T


def test_traces_and_their_ratio_are_those_of_the_covariances():
    treatment, control = pair(9)
    found = compare_gradient_variance(gram_of(treatment, control))
    traces = [np.trace(np.cov(one.T)) for one in (treatment, control)]
    assert found.log_ratio.value == pytest.approx(np.log(traces[0] / traces[1]))
    left_out = [
        np.log(np.trace(np.cov(np.delete(treatment, b, 0).T)) / np.trace(np.cov(np.delete(control, b, 0).T)))
        for b in range(9)
    ]
    jackknife = np.sqrt(8 / 9 * ((left_out - np.mean(left_out)) ** 2).sum())
    assert found.log_ratio.standard_error == pytest.approx(jackknife)
    distances = [((one - one.mean(0)) ** 2).sum(1) for one in (treatment, control)]
    assert np.allclose(squared_distances(gram_of(treatment, control)), distances)
    assert found.kurtosis == pytest.approx([stats.kurtosis(d, fisher=False) for d in distances])
    assert found.top_share == pytest.approx([d.max() / d.sum() for d in distances])


def test_sign_flips_equal_full_enumeration():
    treatment, control = pair(8)
    differences = [((one - one.mean(0)) ** 2).sum(1) for one in (control, treatment)]
    z = differences[0] - differences[1]
    flips = np.array(list(itertools.product((1, -1), repeat=8))) @ z
    expected = (np.abs(flips) >= abs(z.sum()) - 1e-9).mean()
    assert compare_gradient_variance(gram_of(treatment, control)).test.p_value == pytest.approx(expected)


def test_disjoint_pairs_are_half_the_squared_differences():
    treatment, control = pair(7)
    expected = [
        (((control[i] - control[i + 1]) ** 2).sum() - ((treatment[i] - treatment[i + 1]) ** 2).sum()) / 2
        for i in (0, 2, 4)
    ]
    assert np.allclose(disjoint_differences(gram_of(treatment, control)), expected)


def test_one_batch_that_dominates_is_said_and_wrong_matrices_are_refused():
    treatment, control = pair(8)
    treatment[0] *= 100
    assert compare_gradient_variance(gram_of(treatment, control)).heavy_tailed
    for wrong in (np.eye(6), np.eye(9), np.full((8, 8), np.nan)):
        with pytest.raises(ValueError, match="B >= 4"):
            compare_gradient_variance(wrong)


@pytest.mark.parametrize("kind", ["heavy", "spectrum"])
def test_equal_traces_are_rejected_at_the_level(kind):
    rng = np.random.default_rng(1)
    runs = 150
    hits = sum(
        compare_gradient_variance(draw_gradients(rng, 24, kind)).test.p_value <= 0.05 for _ in range(runs)
    )
    # Five per cent, within three of its own standard errors, and a little for centring on the same batches.
    assert hits / runs < 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs) + 0.01


def test_half_the_trace_is_found():
    rng = np.random.default_rng(2)
    found = [compare_gradient_variance(draw_gradients(rng, 32, "heavy", ratio=0.5)) for _ in range(60)]
    assert np.mean([one.test.p_value <= 0.05 for one in found]) > 0.6
    assert np.mean([one.log_ratio.value for one in found]) == pytest.approx(np.log(0.5), abs=0.1)


def test_the_bias_of_values_is_scipys_two_one_sided_tests():
    values = np.random.default_rng(0).normal(2.0, 0.1, size=50)
    found = value_bias(values, 2.0, tolerance=0.05)
    lower = stats.ttest_1samp(values, 1.9, alternative="greater").pvalue
    upper = stats.ttest_1samp(values, 2.1, alternative="less").pvalue
    assert found.equivalence_p == pytest.approx(max(lower, upper))
    assert found.difference_p == pytest.approx(stats.ttest_1samp(values, 2.0).pvalue)
    assert found.outcome is BiasOutcome.EQUIVALENT
    assert value_bias(values, 3.0).outcome is BiasOutcome.BIASED
    assert value_bias(values[:3], 2.0, tolerance=1e-4).outcome is BiasOutcome.INCONCLUSIVE


def test_the_bias_against_a_reference_is_welchs_or_the_paired_test():
    rng = np.random.default_rng(3)
    values, reference = rng.normal(2.0, 0.3, size=40), rng.normal(2.1, 0.1, size=40)
    unpaired = reference_bias(values, reference, paired=False)
    assert unpaired.difference_p == pytest.approx(stats.ttest_ind(values, reference, equal_var=False).pvalue)
    paired = reference_bias(values, reference, paired=True)
    assert paired.difference_p == pytest.approx(stats.ttest_rel(values, reference).pvalue)


def test_nothing_is_concluded_from_a_mean_whose_tail_is_too_heavy():
    # exp(-R) has mean 1 under R ~ N(18, 36): of a thousand draws nearly all are near 0, and say otherwise.
    rng = np.random.default_rng(0)
    found = [value_bias(np.expm1(-rng.normal(18.0, 6.0, size=1000)) + 18.0, 18.0) for _ in range(20)]
    assert sum(one.bias < -0.9 and one.difference_p < 1e-3 for one in found) > 10
    assert {one.outcome for one in found} == {BiasOutcome.INCONCLUSIVE}


@pytest.mark.parametrize("shape", [0.2, 1.0])
def test_the_tail_index_is_that_of_the_tail(shape):
    draws = [stats.genpareto.rvs(shape, size=20_000, random_state=seed) for seed in range(8)]
    found = [tail_index(side * values) for values in draws for side in (-1.0, 1.0)]
    assert np.mean(found) == pytest.approx(shape, abs=0.06)
    assert np.isnan(tail_index(draws[0][:99]))


def test_the_norm_of_a_gradients_bias_is_its_u_statistic():
    rng = np.random.default_rng(4)
    exact = np.array([1.0, 2.0, -1.0])
    samples = exact + rng.normal(size=(12, 3)) * 0.1
    stacked = np.concatenate([samples, exact[None]])
    found = gradient_bias(stacked @ stacked.T)
    h = samples - exact
    expected = sum(h[i] @ h[j] for i in range(12) for j in range(12) if i != j) / (12 * 11) / (exact @ exact)
    assert found.norm.bias == pytest.approx(expected)
    assert found.scale.bias == pytest.approx((samples @ exact).mean() / (exact @ exact) - 1)


@pytest.mark.parametrize(
    ("mean", "outcome"),
    [
        ([1.0, 2.0, -1.0], BiasOutcome.EQUIVALENT),
        ([0.0, 0.0, 0.0], BiasOutcome.BIASED),
        ([3.0, 2.0, 1.0], BiasOutcome.BIASED),  # the right length along the gradient, and something beside it
    ],
)
def test_zero_and_sideways_gradients_are_found_biased(mean, outcome):
    exact = np.array([1.0, 2.0, -1.0])
    samples = np.array(mean) + np.random.default_rng(5).normal(size=(400, 3)) * 0.05
    stacked = np.concatenate([samples, exact[None]])
    assert gradient_bias(stacked @ stacked.T).outcome is outcome


def test_too_few_estimates_or_no_gradient_are_refused():
    for wrong in (np.eye(3), np.zeros((6, 6))):
        with pytest.raises(ValueError, match="at least 3 estimates"):
            gradient_bias(wrong)
