"""The spread of runs against brute force, and its level."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs, pairs_of

from analysis.stats.comparison import spread_finding
from analysis.stats.contrast import objective


def spread_by_hand(values, beta_index, signs):
    """Log ratio of summed absolute deviations, exchanged within the pairs whose sign is -1."""
    sizes = values.copy()
    for index in np.unique(beta_index):
        sizes[beta_index == index] -= np.median(values[beta_index == index], axis=0)
    sizes = np.abs(sizes)
    sizes = np.where((signs == 1)[:, None], sizes, sizes[:, ::-1])
    return np.log(sizes[:, 0].sum() / sizes[:, 1].sum())


@pytest.mark.parametrize("outcome", ["objective", "kl"])
def test_ratio_and_p_equal_full_enumeration(outcome):
    pairs = draw_pairs(np.random.default_rng(1), replicates=4, betas=(0.1, 0.2), spread=4.0)
    values = np.log(pairs.kl) if outcome == "kl" else objective(pairs)
    signs = np.array(list(itertools.product((1, -1), repeat=8)))
    by_hand = np.array([spread_by_hand(values, pairs.beta_index, one) for one in signs])
    found = spread_finding(pairs, outcome)
    assert found.estimate.value == pytest.approx(by_hand[0])
    assert found.test.p_value == pytest.approx((np.abs(by_hand) >= abs(by_hand[0]) - 1e-9).mean())
    symbol = "log KL" if outcome == "kl" else "J"
    assert found.claim.favourable == f"less spread of {symbol} between replicates"


def test_a_larger_kl_is_no_larger_spread():
    pairs = draw_pairs(np.random.default_rng(0), replicates=6)
    ratios = [spread_finding(replace(pairs, kl=pairs.kl * np.array([by, 1.0])), "kl") for by in (1.0, 9.0)]
    assert ratios[0].estimate.value == pytest.approx(ratios[1].estimate.value)


@pytest.mark.parametrize("noise", ["normal", "standard_t"])
def test_equal_spreads_are_rejected_at_the_level(noise):
    rng, sweeps = np.random.default_rng(2), 400
    draw = rng.normal if noise == "normal" else lambda size: rng.standard_t(3, size=size)
    found = [spread_finding(pairs_of(np.ones((8, 2)), draw(size=(8, 2))), "objective") for _ in range(sweeps)]
    rate = np.mean([one.test.p_value <= 0.05 for one in found])
    assert rate < 0.05 + 3 * np.sqrt(0.05 * 0.95 / sweeps)
