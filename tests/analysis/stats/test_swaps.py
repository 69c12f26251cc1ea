from itertools import product

import numpy as np
import pytest
from scipy import stats

from analysis.stats.swaps import swap_test


def enumerate_p(values, units, alternative):
    """Every swap by brute force, in exact integer arithmetic."""
    names = np.unique(units)
    observed, extreme, total = sum(values), 0, 0
    for signs in product((1, -1), repeat=len(names)):
        flipped = sum(
            signs[list(names).index(unit)] * value for value, unit in zip(values, units, strict=True)
        )
        total += 1
        extreme += {
            "two-sided": abs(flipped) >= abs(observed),
            "greater": flipped >= observed,
            "less": flipped <= observed,
        }[alternative]
    return extreme / total


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("seed", range(6))
def test_p_equals_full_enumeration(alternative, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 5, size=9)
    units = np.arange(9) if seed % 2 else rng.integers(0, 5, size=9)
    found = swap_test(values.astype(float), units, alternative=alternative)
    assert found.exact
    assert found.p_value == pytest.approx(
        enumerate_p(values.tolist(), units.tolist(), alternative), abs=1e-12
    )


def test_exact_ties_survive_rounding():
    # 0.1 + 0.2 - 0.3 is 5.6e-17, not 0: a naive comparison would miss half of the ties
    values = np.array([0.1, 0.2, -0.3, 0.4])
    assert swap_test(values).p_value == enumerate_p([1, 2, -3, 4], range(4), "two-sided")


def test_equal_contributions_give_the_binomial_sign_test():
    values = np.array([1.0] * 70 + [-1.0] * 40 + [0.0] * 30)
    found = swap_test(values)
    assert found.exact
    assert found.p_value == pytest.approx(stats.binomtest(70, 110).pvalue)
    assert found.units == 110


def test_random_swaps_agree_with_enumeration_within_their_error():
    values = np.random.default_rng(3).normal(0.4, size=12)
    exact, drawn = swap_test(values), swap_test(values, resamples=2_000)
    assert exact.exact
    assert not drawn.exact
    assert abs(exact.p_value - drawn.p_value) < 5 * np.sqrt(exact.p_value / 2_000)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_smallest_p_is_attained_if_all_signs_agree(count):
    values = np.arange(1.0, count + 1)
    found = swap_test(values)
    assert found.p_value == found.attainable == min(1.0, 2.0 ** (1 - count))


def test_random_swaps_have_a_smallest_p():
    found = swap_test(np.arange(1.0, 41), resamples=999)
    assert found.p_value == found.attainable == 2 / 1000


def test_blocks_swap_together_and_cancel_inside():
    values = np.array([1.0, 2.0, 3.0, -3.0])
    found = swap_test(values, np.array([0, 0, 1, 1]))
    assert found.units == 1
    assert found.p_value == 1.0


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("count", [7, 30])
def test_p_is_that_of_scipys_permutation_test(alternative, count):
    """All swaps if there are few; otherwise two Monte Carlo estimates of the same probability."""
    values = np.random.default_rng(5).normal(0.2, size=count)
    found = swap_test(values, alternative=alternative, resamples=4_000)
    theirs = stats.permutation_test(
        (values,),
        lambda sample, axis: sample.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=4_000,
        alternative=alternative,
        rng=np.random.default_rng(6),
    )
    # the standard error of the difference, doubled p-values having twice that of one side
    error = 0 if count == 7 else 4 * np.sqrt(2 * theirs.pvalue / 4_000)
    assert found.p_value == pytest.approx(float(theirs.pvalue), abs=error + 1e-12)


def test_without_units_p_is_one():
    for values in (np.zeros(0), np.zeros(4)):
        found = swap_test(values)
        assert (found.p_value, found.attainable, found.units) == (1.0, 1.0, 0)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="finite"):
        swap_test(np.array([1.0, np.nan]))
