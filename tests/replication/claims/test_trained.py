"""Arms against each other: the published numbers, and the same by hand."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from analysis.report.matching import match
from analysis.stats.contrast import objective_contrast
from analysis.stats.swaps import RESAMPLES
from replication.claims.evidence import CAPACITIES, SWEEPS
from replication.claims.trained import compared, kl_finding, objectives


@pytest.fixture(scope="module")
def trained(verified):
    return verified.evidence.sweeps


@pytest.mark.parametrize("name", sorted(SWEEPS.keys() - CAPACITIES.keys()))
def test_differences_in_j_are_those_of_the_report(trained, name):
    found = objectives(trained[name])
    reported = {one["treatment"]: one["objective"] for one in trained[name].numbers["comparisons"]}
    assert found.keys() == reported.keys()
    for arm, verdict in found.items():
        if reported[arm]["p_adjusted"] is None:  # withheld, as the plan grew after its results
            continue
        assert verdict.estimate.value == pytest.approx(reported[arm]["estimate"], rel=1e-11)
        assert verdict.adjusted == pytest.approx(reported[arm]["p_adjusted"], rel=1e-11)


@pytest.mark.parametrize("name", sorted(CAPACITIES))
def test_ratios_of_kls_are_means_of_paired_logarithms(trained, name):
    one = trained[name]
    arms = next(arm for arm in one.sweep.plan.grid.arms if arm != "own-exact"), "own-exact"
    kls = [
        [run.final["kl"] for (arm, _, _), run in sorted(one.sweep.grid.items()) if arm == label]
        for label in arms
    ]
    ratios = np.log(kls[0]) - np.log(kls[1])
    if len(one.sweep.plan.grid.blocks) == 2:  # the mean of two means is half the difference to minus one
        test, scale = stats.ttest_ind(ratios[::2], -ratios[1::2], equal_var=False), 2
    else:
        test, scale = stats.ttest_1samp(ratios, 0), 1
    (verdict,) = compared([(one, *arms)], kl_finding)
    if one.sweep.plan.tuning:
        return  # the choice of rates widens it
    found = verdict.estimate.interval()
    assert verdict.estimate.value == pytest.approx(ratios.mean())
    assert (found.low, found.high) == pytest.approx(np.array(test.confidence_interval()) / scale)


def test_the_correction_is_over_all_designs(trained):
    one = trained["noise"]
    (alone,) = compared([(one, "rb", "mc")], kl_finding)
    several = compared([(one, arm, "mc") for arm in ("tilted", "rb", "combination")], kl_finding)
    assert several[1].adjusted == min(1, 3 * alone.adjusted)
    assert several[1].interval.low < alone.interval.low


def all_swaps(differences):
    """Share of all swaps of pairs whose sum is at least as far from 0, by halves."""
    sums = [np.zeros(1), np.zeros(1)]
    for index, one in enumerate(differences):
        sums[index % 2] = np.concatenate([sums[index % 2] + one, sums[index % 2] - one])
    first, second = sums[0], np.sort(sums[1])
    least = abs(differences.sum()) * (1 - 1e-12)
    return 2 * (len(second) - np.searchsorted(second, least - first)).sum() / 2.0 ** len(differences)


def test_a_p_of_random_swaps_is_near_that_of_all(trained):
    """The p of replication/results/noise, from all 2^24 swaps in place of 9,999."""
    one, every = trained["noise"], {}
    reported = {found["treatment"]: found["objective"]["p"] for found in one.numbers["comparisons"]}
    for arm in reported:
        pairs = match(one.sweep, arm, "mc")
        every[arm] = all_swaps((found := objective_contrast(pairs)).values * found.weights)
        assert abs(reported[arm] - every[arm]) < 5 * np.sqrt(every[arm] / RESAMPLES) + 2 / RESAMPLES
    corrected = dict(zip(every, multipletests([*every.values()], method="bonferroni")[1], strict=True))
    printed = {arm: float(f"{p:.3g}") for arm, p in corrected.items()}
    assert (printed["rb"], printed["tilted"], printed["combination"]) == (0.0295, 1.43e-05, 0.12)
    assert corrected["mc-x4"] < 1e-5


def test_an_arm_is_found_by_its_estimator(trained):
    assert trained["noise"].arm("MonteCarlo") == "mc"
    assert trained["noise"].arm("K3Loss") is None


def test_an_arm_with_prefix_rewards_is_not_that_of_its_estimator(trained):
    assert trained["smollm2_samples"].arm("RaoBlackwellControlVariate") is None
    assert trained["smollm2_reviews"].arm("RaoBlackwellControlVariate") == "combination"
