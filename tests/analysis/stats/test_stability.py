"""Stability and hypervolume against brute force."""

import itertools

import numpy as np
import pytest
from designs import draw_pairs
from generators import draw_curves

from analysis.stats.comparison import roughness_contributions, spread_test
from analysis.stats.frontier import hypervolume, hypervolume_differences
from analysis.stats.swaps import mean_swap_test

SIGNS = np.array(list(itertools.product((1, -1), repeat=6)))


def spread_by_hand(values, beta_index, signs):
    """Log ratio of summed absolute residuals, each step weighing the same, and the largest of a step."""
    residuals = values.copy()
    for index in np.unique(beta_index):
        residuals[beta_index == index] -= np.median(values[beta_index == index], axis=0)
    sizes = np.abs(residuals)
    sizes = np.where((signs == 1)[:, None, None], sizes, sizes[:, ::-1])
    curve = np.log(sizes[:, 0].sum(0)) - np.log(sizes[:, 1].sum(0))
    ours, theirs = (sizes / sizes.sum(axis=(0, 1))).sum(axis=(0, 2))
    return np.log(ours / theirs), np.abs(curve).max()


def test_the_spread_tests_equal_full_enumeration():
    values = draw_curves(np.random.default_rng(0), 6, ratio=3.0, steps=12)
    beta_index = np.array([0, 0, 0, 1, 1, 1])
    found = spread_test(values, beta_index, np.arange(6))
    by_hand = np.array([spread_by_hand(values, beta_index, signs) for signs in SIGNS])
    observed = spread_by_hand(values, beta_index, np.ones(6))
    assert found.ratio == pytest.approx(observed[0])
    assert found.integrated.p_value == pytest.approx(
        (np.abs(by_hand[:, 0]) >= abs(observed[0]) - 1e-9).mean()
    )
    assert found.pointwise.p_value == pytest.approx((by_hand[:, 1] >= observed[1] - 1e-9).mean())


def test_roughness_differs_from_spread():
    rng = np.random.default_rng(1)
    values = draw_curves(rng, 8, steps=40)
    values[:, 1] += rng.normal(size=(8, 40)) * 2
    rough = roughness_contributions(values, np.zeros(8, dtype=int))
    assert rough.mean() < 0
    assert mean_swap_test(rough).p_value == pytest.approx(2 / 2**8)


@pytest.mark.parametrize("noise", ["gaussian", "t5", "scale"])
def test_equal_spreads_are_rejected_at_the_level(noise):
    rng, runs = np.random.default_rng(2), 200
    beta_index, units = np.zeros(8, dtype=int), np.arange(8)
    hits = sum(
        spread_test(draw_curves(rng, 8, noise=noise, steps=20), beta_index, units).integrated.p_value <= 0.05
        for _ in range(runs)
    )
    assert hits / runs < 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)


def test_curves_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="leave out pairs with a diverged run"):
        spread_test(np.full((3, 2, 4), np.nan), np.zeros(3, dtype=int), np.arange(3))


def area_by_hand(kl, reward, corner):
    """Area of a union of rectangles on (log KL, reward), as a sum over cells of the grid of their edges."""
    xs = np.unique([*np.log(kl[kl < corner[0]]), np.log(corner[0])])
    ys = np.unique([*reward[reward > corner[1]], corner[1]])
    total = 0.0
    for left, right in itertools.pairwise(xs):
        for low, high in itertools.pairwise(ys):
            if any(np.log(k) <= left and r >= high for k, r in zip(kl, reward, strict=True)):
                total += (right - left) * (high - low)
    return total


def test_hypervolume_is_the_area_of_the_union():
    rng = np.random.default_rng(3)
    for _ in range(20):
        kl, reward = rng.uniform(0.1, 4, size=6), rng.normal(size=6)
        assert hypervolume(kl, reward, (3.0, -0.5)) == pytest.approx(area_by_hand(kl, reward, (3.0, -0.5)))
    assert hypervolume(np.array([]), np.array([]), (3.0, 0.0)) == 0
    with pytest.raises(ValueError, match="remove diverged runs first"):
        hypervolume(np.array([np.nan]), np.array([1.0]), (3.0, 0.0))


def test_hypervolumes_are_compared_by_replicate():
    pairs = draw_pairs(np.random.default_rng(5), replicates=4, betas=(0.1, 0.3))
    corner = (20.0, -1.0)
    expected = []
    for replicate in range(4):
        rows = pairs.replicate == replicate
        ours, theirs = (
            area_by_hand(pairs.kl[rows, side], pairs.reward[rows, side], corner) for side in (0, 1)
        )
        expected.append(ours - theirs)
    assert hypervolume_differences(pairs, corner) == pytest.approx(expected)
