from itertools import product

import numpy as np
import pytest
from scipy import stats

from analysis.stats.swaps import mean_swap_test


def enumerate_p(values, units):
    """Every swap by brute force, in exact integer arithmetic."""
    names = list(np.unique(units))
    sums = [
        sum(signs[names.index(unit)] * value for value, unit in zip(values, units, strict=True))
        for signs in product((1, -1), repeat=len(names))
    ]
    return sum(abs(one) >= abs(sum(values)) for one in sums) / len(sums)


@pytest.mark.parametrize("seed", range(6))
def test_p_equals_full_enumeration(seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 5, size=9)
    units = np.arange(9) if seed % 2 else rng.integers(0, 5, size=9)
    found = mean_swap_test(values.astype(float), units=units)
    assert found.exact
    assert found.p_value == pytest.approx(enumerate_p(values.tolist(), units.tolist()), abs=1e-12)


def test_exact_ties_survive_rounding():
    # 0.1 + 0.2 - 0.3 is 5.6e-17, not 0: a naive comparison would miss half of the ties
    values = np.array([0.1, 0.2, -0.3, 0.4])
    assert mean_swap_test(values).p_value == enumerate_p([1, 2, -3, 4], range(4))


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_smallest_p_is_attained_if_all_signs_agree(count):
    values = np.arange(1.0, count + 1)
    found = mean_swap_test(values)
    assert found.p_value == found.attainable == min(1.0, 2.0 ** (1 - count))


def test_random_swaps_have_a_smallest_p():
    found = mean_swap_test(np.arange(1.0, 41), resamples=999)
    assert found.p_value == found.attainable == 2 / 1000


def test_blocks_swap_together_and_cancel_inside():
    values = np.array([1.0, 2.0, 3.0, -3.0])
    found = mean_swap_test(values, units=np.array([0, 0, 1, 1]))
    assert found.units == 1
    assert found.p_value == 1.0


@pytest.mark.parametrize("count", [7, 30])
def test_p_is_that_of_scipys_permutation_test(count):
    """All swaps if there are few; otherwise two Monte Carlo estimates of the same probability."""
    values = np.random.default_rng(5).normal(0.2, size=count)
    found = mean_swap_test(values, resamples=4_000)
    theirs = stats.permutation_test(
        (values,),
        lambda sample, axis: sample.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=4_000,
        rng=np.random.default_rng(6),
    )
    # the standard error of the difference, doubled p-values having twice that of one side
    error = 0 if count == 7 else 4 * np.sqrt(2 * theirs.pvalue / 4_000)
    assert found.p_value == pytest.approx(float(theirs.pvalue), abs=error + 1e-12)


def test_without_units_p_is_one():
    for values in (np.zeros(0), np.zeros(4)):
        found = mean_swap_test(values)
        assert (found.p_value, found.attainable, found.units) == (1.0, 1.0, 0)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="finite"):
        mean_swap_test(np.array([1.0, np.nan]))
