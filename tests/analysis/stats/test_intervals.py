"""Sums of independent estimates against scipy's Welch test and against their own sampling distribution."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.stats.intervals import Estimate, weighted_sum


def difference(ours, theirs) -> Estimate:
    """The unweighted mean over strata of mean(ours) - mean(theirs)."""
    share = 1.0 / len(ours)
    return weighted_sum(
        [
            (sign * share, Estimate.of_mean(values))
            for sign, own in ((1, ours), (-1, theirs))
            for values in own
        ]
    )


def test_one_stratum_is_welchs_test():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1.0, 2.0, 7), rng.normal(0.0, 0.5, 4)
    found = difference([ours], [theirs])
    expected = stats.ttest_ind(ours, theirs, equal_var=False)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert found.interval().ends == pytest.approx(tuple(expected.confidence_interval()), rel=1e-12)


def test_one_group_is_the_t_interval():
    values = np.random.default_rng(1).normal(size=6)
    expected = stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
    assert Estimate.of_mean(values).interval().ends == pytest.approx(expected, rel=1e-12)


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
    assert math.isnan(lone.p_value)
    assert math.isnan(difference([np.array([])], [np.array([0.0, 1.0])]).value)
    same = np.array([1.0, 1.0])
    assert difference([same], [same]).p_value == 1.0
    assert difference([same], [same + 1]).p_value == 0.0
