"""Unpaired differences against scipy's Welch test and against their own sampling distribution."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.stats.unpaired import difference, mean_over, two_sided_p


def test_one_stratum_is_welchs_test():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1.0, 2.0, 7), rng.normal(0.0, 0.5, 4)
    found = difference([ours], [theirs])
    expected = stats.ttest_ind(ours, theirs, equal_var=False)
    assert two_sided_p(found) == pytest.approx(expected.pvalue, rel=1e-12)
    interval = found.interval()
    low, high = expected.confidence_interval()
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-12)


def test_one_group_is_the_t_interval():
    values = np.random.default_rng(1).normal(size=6)
    interval = mean_over([values]).interval()
    low, high = stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-12)


def test_strata_have_equal_weights_and_the_interval_covers():
    """Three betas, unequal sizes and spreads: the mean of the three differences, in 95% of sweeps."""
    rng = np.random.default_rng(2)
    sizes, spreads, shifts = (4, 6, 8), (1.0, 3.0, 0.2), (0.5, -1.0, 2.0)
    truth, covered, sweeps = float(np.mean(shifts)), 0, 2000
    for _ in range(sweeps):
        ours = [rng.normal(d, s, n) for n, s, d in zip(sizes, spreads, shifts, strict=True)]
        theirs = [rng.normal(0, 2 * s, n) for n, s in zip(sizes, spreads, strict=True)]
        interval = difference(ours, theirs).interval()
        covered += interval.low <= truth <= interval.high
    assert 0.935 < covered / sweeps < 0.97


def test_too_few_values_have_no_interval():
    lone = difference([np.array([1.0])], [np.array([0.0, 0.5])])
    assert (lone.value, lone.interval()) == (0.75, None)
    assert math.isnan(two_sided_p(lone))
    assert math.isnan(difference([np.array([])], [np.array([0.0, 1.0])]).value)
    same = np.array([1.0, 1.0])
    assert two_sided_p(difference([same], [same])) == 1.0
    assert two_sided_p(difference([same], [same + 1])) == 0.0
    with pytest.raises(ValueError, match="1 strata against 2"):
        difference([same], [same, same])
