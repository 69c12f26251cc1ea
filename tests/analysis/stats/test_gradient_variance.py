"""Gradient variance compared with NumPy on the gradients, and the size of the tests."""

import numpy as np
import pytest
from generators import draw_gradients

from analysis.stats.gradient_noise import (
    HEAVY_SHARE,
    compare_gradient_variance,
    disjoint_halves,
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
    assert found.top_share == pytest.approx([d.max() / d.sum() for d in distances])


def test_disjoint_pairs_are_half_the_squared_differences():
    treatment, control = pair(7)
    expected = [[((g[i] - g[i + 1]) ** 2).sum() / 2 for i in (0, 2, 4)] for g in (treatment, control)]
    assert np.allclose(disjoint_halves(gram_of(treatment, control)), expected)


def test_a_dominant_batch_is_reported_and_invalid_matrices_are_refused():
    treatment, control = pair(8)
    treatment[0] *= 100
    assert max(compare_gradient_variance(gram_of(treatment, control)).top_share) > HEAVY_SHARE
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
    assert hits / runs < 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)


def test_half_the_trace_is_detected():
    rng = np.random.default_rng(2)
    found = [compare_gradient_variance(draw_gradients(rng, 64, "heavy", ratio=0.5)) for _ in range(60)]
    assert np.mean([one.test.p_value <= 0.05 for one in found]) > 0.6
    assert np.mean([one.log_ratio.value for one in found]) == pytest.approx(np.log(0.5), abs=0.1)
