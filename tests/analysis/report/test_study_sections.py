"""The sections on estimates, off-policy corrections and distillation, from artifacts with known numbers."""

import json

import numpy as np
import pytest
from reading import SMALL
from scipy import stats
from synthetic import write_sweep

from analysis.report.build import build
from analysis.report.verify import verify
from analysis.results.artifacts import read_studies
from analysis.stats.bias import standard_bias
from analysis.stats.distillation import distilled_arms, regret

RNG = np.random.default_rng(0)


def off_policy():
    bias = [[0.0, 0.1, 0.3], [0.0, 0.2, 0.5]]
    noise = [[1.0, 1.5, 2.0]] * 2
    zero = [[0.0, 1e-15, 0.0]] * 2
    return {
        "schema": 1,
        "beta": 0.5,
        "steps": [0, 1, 2],
        "moved": [[0.0, 0.01, 0.05]] * 2,
        "moments": {
            "MonteCarlo": {
                "clip": {term: {"bias": bias, "noise": noise} for term in ("kl", "objective")},
                "prefix": {term: {"bias": zero, "noise": noise} for term in ("kl", "objective")},
            }
        },
    }


def distillation():
    base = RNG.lognormal(sigma=0.1, size=(2, 2, 7))
    worse = base * RNG.lognormal(0.5, 0.05, size=base.shape)
    slow = base * np.array([1.0, 3.0])[:, None]  # the second rate is bad
    return {
        "schema": 1,
        "steps": 10,
        "learning_rates": [0.1, 0.3],
        "selection": 2,
        "evaluation": 5,
        "cells": [{"capacity": kind, "distance": 1.0, "batch": 4} for kind in ("full", "limited")],
        "start": (3 * base[:, 0]).tolist(),
        "finals": {
            "analytic": (0.1 * base).tolist(),
            "whole future, exact": slow.tolist(),
            "own token, exact": worse.tolist(),
        },
    }


def estimation():
    values = 1 + 0.1 * RNG.standard_normal((3, 40))
    return {
        "schema": 2,
        "prompts": 3,
        "completions": 40,
        "group_sizes": [1, 5],
        "tolerance": 0.05,
        "stratum": 1,
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


ARTIFACTS = {"off_policy": off_policy, "distillation": distillation, "estimation": estimation}


@pytest.fixture
def sweep_with(tmp_path, monkeypatch):
    """A sweep of which one run has the artifacts."""

    def written(**artifacts):
        monkeypatch.setattr("synthetic.studies", lambda beta: artifacts)
        return write_sweep(tmp_path, studied=[0.1], **SMALL)

    return written


def test_the_sections_are_on_the_page_and_verified(sweep_with, undrawn):
    runs = sweep_with(**{name: made() for name, made in ARTIFACTS.items()})
    page = build(runs).read_text("utf-8")
    found = json.loads((runs / "results.json").read_text())["sections"]
    assert found["off_policy"]["MonteCarlo clip kl"]["bias"] == pytest.approx([0, 0.15, 0.4])
    assert "0 / 1.50" in page
    assert found["distillation"]["whole future, exact"]["rates"] == [0.1, 0.1]
    assert found["distillation"]["own token, exact"]["worst_ratio"] > 1.3
    k2 = found["estimation"]["0"]["k2"]
    assert k2["bias_outcome"] == "biased"
    assert found["estimation"]["0"]["k1"]["bias_outcome"] == "unbiased within the margin"
    assert found["estimation"]["0 reference mass"] == [1.0, 0.9, 0.5]
    assert "A policy, in nats" in page
    assert verify(runs).differences == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("off_policy", {"steps": [0, 2]}),
        ("off_policy", {"moments": {}}),
        ("distillation", {"finals": {}}),
        ("distillation", {"learning_rates": [0.1]}),
        ("estimation", {"tolerance": 0.0}),
        ("estimation", {"stratum": 3}),
    ],
)
def test_damaged_artifacts_are_refused(name, change):
    with pytest.raises((ValueError, KeyError)):
        read_studies({name: {**ARTIFACTS[name](), **change}})


def test_rates_are_chosen_on_the_selection_runs_and_arms_judged_on_the_others():
    (artifact,) = read_studies({"distillation": distillation()})
    arms = distilled_arms(artifact, "whole future, exact")
    own, control = arms["own token, exact"][0], arms["whole future, exact"][0]
    values = artifact.finals["own token, exact"][0]
    best = np.log(values[:, :2]).mean(1).argmin()
    assert own.rate == artifact.learning_rates[best]
    differences = np.log(values[best, 2:]) - np.log(control.kl)
    assert own.log_ratio.value == pytest.approx(differences.mean())
    assert own.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert own.p <= own.p_holm <= 2 * own.p + 1e-12
    regrets = regret(arms)
    assert regrets["whole future, exact"] == pytest.approx(1)
    ratios = [np.exp(np.log(one.kl).mean()) for one in arms["own token, exact"]]
    least = [np.exp(np.log(one.kl).mean()) for one in arms["whole future, exact"]]
    assert regrets["own token, exact"] == pytest.approx(max(np.array(ratios) / least))


def test_the_bias_against_an_independent_sample_has_welchs_error():
    values, standard, error = RNG.normal(1, 0.2, size=(4, 50)), np.full(4, 1.02), np.full(4, 0.01)
    found = standard_bias(values, standard, error, tolerance=0.5)
    variance = (values.var(axis=1, ddof=1) / 50 + error**2).sum() / 16
    assert found.bias == pytest.approx(values.mean() - 1.02)
    assert found.difference_p == pytest.approx(2 * stats.norm.sf(abs(found.bias) / variance**0.5), abs=0.02)
    assert found.high - found.low == pytest.approx(2 * 1.645 * variance**0.5, rel=0.02)
