"""What a design is said to detect, against simulated sweeps and statsmodels."""

from dataclasses import replace

import numpy as np
import pytest
from designs import draw_pairs
from scipy import stats
from statsmodels.stats.power import TTestPower

from analysis.stats import Rules, compare
from analysis.stats.contrast import TTest
from analysis.stats.power import NULLS, Design, rejections, swap_p_values


@pytest.mark.parametrize("count", [4, 6, 8, 12])
def test_what_a_pilot_promises_is_kept_on_average(count):
    """With the pilot's SD taken as known, the power is .63, .68, .71 and .74."""
    rng, sweeps = np.random.default_rng(count), 4_000
    pilot, planned = rng.normal(size=(2, sweeps, count))
    reach = Design(1, count).reach(pilot=count - 1.0)
    errors = pilot.std(axis=1, ddof=1) / np.sqrt(count)
    p_values = stats.ttest_1samp(planned + (reach * errors)[:, None], 0.0, axis=1).pvalue
    assert (p_values <= 0.05).mean() == pytest.approx(0.8, abs=0.025)


@pytest.mark.parametrize("design", [Design(3, 2), Design(3, 3), Design(3, 4), Design(7, 1, level=0.046)])
def test_what_swaps_of_pairs_detect_is_at_the_level_that_they_can_attain(design):
    """At .05 with 6 pairs only the smallest of 32 p-values rejects: by the level alone the power is .72.

    With 7 pairs two of 64 do so at .046.
    """
    rng = np.random.default_rng(design.units)
    effect = design.reach() / np.sqrt(design.units)
    p_values = swap_p_values(rng.normal(size=(4_000, design.units)) + effect, resamples=4096)
    assert (p_values <= design.level).mean() == pytest.approx(0.8, abs=0.03)


def test_what_a_test_cannot_reject_it_cannot_detect():
    assert Design(5, 1).reach() is None
    grown = Design(2, 2).grown(lambda one: one.reach() is not None)
    assert grown == Design(2, 3)
    pairs = draw_pairs(np.random.default_rng(0), replicates=2, betas=(0.1, 0.2), lift=9.0)
    (found,) = compare([pairs], Rules())
    assert found.primary.attainable == 2 / 16
    assert found.primary.detectable is None


def test_with_a_known_spread_it_is_that_of_statsmodels():
    effect = Design(1, 10).reach() / np.sqrt(10)
    assert TTestPower().power(effect, 10, 0.05) == pytest.approx(0.8, abs=1e-3)


DESIGNS = [Design(1, 8), Design(3, 4), Design(1, 8, 8), Design(2, 8, 4), Design(2, 8, 2), Design(1, 8, 2)]


@pytest.mark.parametrize("design", DESIGNS)
def test_the_test_of_a_plan_is_that_of_its_page_and_so_is_what_is_detected(design):
    betas, rng = (0.1, 0.2, 0.4)[: design.betas], np.random.default_rng(1)
    pairs = replace(draw_pairs(rng, replicates=design.replicates, betas=betas), blocks=design.blocks)
    (found,) = compare([pairs], Rules())
    verdict, mean = found.primary, found.primary.estimate
    assert isinstance(verdict.test, TTest) == design.by_t
    assert verdict.test.units == design.units
    assert verdict.detectable == pytest.approx(design.reach(mean.degrees) * mean.standard_error, rel=1e-3)


def test_the_smallest_design_that_is_enough_is_found():
    assert Design(1, 8).grown(lambda one: one.replicates >= 13) == Design(1, 13)
    assert Design(1, 8, 4).grown(lambda one: one.blocks >= 7) == Design(1, 14, 7)
    assert Design(1, 8, 2).grown(lambda one: one.replicates >= 13) == Design(1, 14, 2)
    assert Design(1, 8).grown(lambda one: False) is None


@pytest.mark.parametrize("by_t", [True, False])
def test_tests_keep_their_level_unless_differences_are_skewed_or_collapse(by_t):
    """Eight units have no collapse to see in .43 of the sweeps."""
    found = rejections(8, 0.05, by_t=by_t)
    assert sum(found["normal"]) == pytest.approx(0.05, abs=0.012)
    assert sum(found["log-normal"]) > 0.1
    assert found["collapses"][0] == pytest.approx(0.9**8, abs=0.03)
    rng = np.random.default_rng(0)
    for draw in NULLS.values():  # of mean 0
        assert draw(rng, (400, 1_000)).mean() == pytest.approx(0.0, abs=0.02)
