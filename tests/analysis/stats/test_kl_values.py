"""Spreads of KL estimates compared with explicit formulas, and the detection of biases."""

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from analysis.stats.kl_values import BiasOutcome, estimator_spreads, missed_mass


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    k1 = rng.normal(1.0, 2.0, (30, 40))
    ht = {size: k1.reshape(30, -1, size).mean(axis=2) for size in (1, 4)}
    return {"k1": k1, "rb": 1.0 + (k1 - 1.0) / 10, "off": k1 + 0.5}, ht


def test_spread_is_the_root_of_the_mean_variance_over_prompts(drawn):
    values, ht = drawn
    found = estimator_spreads(values, ht, [1, 4])
    expected = np.sqrt(np.mean([np.var(row, ddof=1) for row in values["k1"]]))
    assert found["k1"].deviations[1] == pytest.approx(expected)
    assert found["k1"].deviations[4] == pytest.approx(expected / 2)
    assert found["rb"].deviations[1] == pytest.approx(expected / 10)
    assert found["ht"].deviations[4] == pytest.approx(np.sqrt(ht[4].var(axis=1, ddof=1).mean()))


def test_the_ratio_of_variances_has_a_jackknife_error_over_prompts(drawn):
    values, ht = drawn
    found = estimator_spreads(values, ht, [4])["off"].log_ratio
    assert found.value == pytest.approx(0)
    noisy = {**values, "rb": values["rb"] * np.random.default_rng(1).uniform(1, 3, (30, 1))}
    found = estimator_spreads(noisy, ht, [4])["rb"].log_ratio
    of, over = (noisy[name].var(axis=1, ddof=1) for name in ("rb", "k1"))
    left_out = [np.log(np.delete(of, i).sum() / np.delete(over, i).sum()) for i in range(30)]
    assert found.value == pytest.approx(np.log(of.sum() / over.sum()))
    assert found.standard_error == pytest.approx(np.std(left_out) * np.sqrt(29))


def test_the_verdicts_are_biased_unbiased_and_inconclusive(drawn):
    values, ht = drawn
    values["near"] = values["k1"] + np.random.default_rng(2).normal(0, 0.01, (30, 40))
    found = estimator_spreads(values, ht, [1, 4])
    assert found["k1"].bias is None
    assert found["off"].bias.outcome is BiasOutcome.BIASED
    assert found["near"].bias.outcome is BiasOutcome.EQUIVALENT
    assert found["rb"].bias.outcome is BiasOutcome.THEOREM


def test_no_sample_calls_an_estimator_biased_that_is_unbiased_by_a_theorem():
    """Of q / p, whose mean is 1, no draw is above .4: the control variate misses .74 in every sample."""
    rng = np.random.default_rng(0)
    k1 = rng.normal(18.0, 6.0, (30, 40))
    covered = 0.26 + 0.02 * rng.normal(size=(30, 40))
    values = {"k1": k1, "cv": k1 + covered - 1.0, "off": k1 + covered - 1.0}
    found = estimator_spreads(values, {1: k1}, [1])
    assert found["off"].bias.outcome is BiasOutcome.BIASED
    assert found["cv"].bias.outcome is BiasOutcome.THEOREM
    assert missed_mass(values) == pytest.approx(0.74, abs=0.01)
    assert np.isnan(missed_mass({"k1": k1}))


@pytest.mark.parametrize("values", [{}, {"k1": np.ones((1, 4))}, {"k1": np.ones((4, 1))}])
def test_too_few_values_are_refused(values):
    with pytest.raises(ValueError, match="at least 2 prompts and 2 completions"):
        estimator_spreads(values, {}, [1])


def test_p_values_of_biases_are_corrected_together(drawn):
    values, ht = drawn
    found = estimator_spreads(values, ht, [1, 4], snapshots=2)
    raw = [found[name].bias.estimate.p_value for name in ("rb", "off", "ht")] * 2
    expected = multipletests(raw, method="bonferroni")[1]
    for name, p_value in zip(("rb", "off", "ht"), expected[:3], strict=True):
        assert found[name].bias.difference_p == pytest.approx(p_value)
    assert found["off"].bias.outcome is BiasOutcome.BIASED
    assert found["k1"].bias is None
    assert found["off"].bias.interval.level == pytest.approx(1 - 0.1 / 6)
