"""Holm's correction against statsmodels'."""

import math

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from analysis.stats.holm import holm


@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_it_is_statsmodels(size):
    p_values = np.random.default_rng(size).beta(0.3, 1, size).round(2)  # with ties, and zeros
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1], abs=1e-15)


def test_tests_that_were_not_run_count_with_p_1_and_unknown_ones_stay_unknown():
    expected = multipletests([0.01, 0.2, 0.012, 1, 1], method="holm")[1]
    found = holm([0.01, math.nan, 0.2, 0.012], size=5)
    assert found == pytest.approx([expected[0], math.nan, *expected[1:3]], nan_ok=True, abs=1e-15)
    assert np.isnan(holm([math.nan], size=3)).all()
    assert holm([]).size == 0
