"""The section on estimates, from artifacts with known numbers."""

import json

import numpy as np
import pytest
from scipy import stats

from analysis.report.build import build
from analysis.report.verify import verify
from analysis.results.artifacts import read_studies
from analysis.stats.kl_values import standard_bias

RNG = np.random.default_rng(0)


def estimation():
    values = 1 + 0.1 * RNG.standard_normal((3, 40))
    return {
        "schema": 2,
        "prompts": 3,
        "completions": 40,
        "group_sizes": [1, 5],
        "tolerance": 0.05,
        "snapshots": [
            {
                "step": 0,
                "label": "a policy",
                "values": {
                    "k1": values.tolist(),
                    "rb": (0.5 + 0.5 * values).tolist(),
                    "k2": (values - 0.5).tolist(),
                },
                "horvitz_thompson": {"1": values.tolist(), "5": values.reshape(3, 8, 5).mean(2).tolist()},
                "exact": [1.0, 1.0, 1.0],
                "reference_mass": [1.0, 0.9, 0.5],
                "seconds": {"sampling": 1.0, "k1": 0.5, "rb": 0.75},
            }
        ],
    }


def test_the_sections_are_on_the_page_and_verified(sweep_with, undrawn):
    runs = sweep_with(estimation=estimation(), of_another_package={"any": "thing"})
    page = build(runs).read_text("utf-8")
    found = json.loads((runs / "results.json").read_text())["sections"]
    k2 = found["estimation"]["0"]["k2"]
    assert k2["bias_outcome"] == "biased"
    assert found["estimation"]["0"]["k1"]["bias_outcome"] == "unbiased within the margin"
    assert found["estimation"]["0 reference mass"] == [1.0, 0.9, 0.5]
    assert "A policy, in nats" in page
    assert verify(runs).differences == []


@pytest.mark.parametrize("change", [{"tolerance": 0.0}, {"group_sizes": [3]}])
def test_damaged_artifacts_are_refused(change):
    with pytest.raises((ValueError, KeyError)):
        read_studies({"estimation": estimation() | change})


def test_the_bias_against_an_independent_sample_has_welchs_error():
    values, standard, error = RNG.normal(1, 0.2, size=(4, 50)), np.full(4, 1.02), np.full(4, 0.01)
    found = standard_bias(values, standard, error, tolerance=0.5)
    variance = (values.var(axis=1, ddof=1) / 50 + error**2).sum() / 16
    assert found.estimate.value == pytest.approx(values.mean() - 1.02)
    assert found.difference_p == pytest.approx(
        2 * stats.norm.sf(abs(found.estimate.value) / variance**0.5), abs=0.02
    )
    assert np.ptp(found.interval.ends) == pytest.approx(2 * 1.645 * variance**0.5, rel=0.02)
