"""The sections on off-policy corrections and distillation, from artifacts with known numbers."""

import json

import numpy as np
import pytest
from scipy import stats

from analysis.cli import main as analysis
from replication.__main__ import main
from replication.artifacts import read_distillation
from replication.distilled import distilled_arms, regret

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


ARTIFACTS = {"off_policy": off_policy, "distillation": distillation}


def test_the_sections_are_on_the_page_and_verified(sweep_with, undrawn):
    runs = sweep_with(**{name: made() for name, made in ARTIFACTS.items()})
    assert main(["report", str(runs)]) == 0
    page = (runs / "report.html").read_text("utf-8")
    found = json.loads((runs / "results.json").read_text())["sections"]
    assert found["off_policy"]["MonteCarlo clip kl"]["bias"] == pytest.approx([0, 0.15, 0.4])
    assert "0 / 1.50" in page
    assert found["distillation"]["whole future, exact"]["rates"] == [0.1, 0.1]
    assert found["distillation"]["own token, exact"]["worst_ratio"] > 1.3
    assert main(["verify", str(runs)]) == 0


def test_a_damaged_artifact_is_named_and_stops_no_ordinary_report(sweep_with, undrawn, capsys):
    runs = sweep_with(off_policy={"steps": "none"})
    assert main(["report", str(runs)]) == 2
    assert "not an artifact of off_policy" in capsys.readouterr().err
    assert analysis(["report", str(runs)]) == 0


def test_rates_are_chosen_on_the_selection_runs_and_arms_judged_on_the_others():
    artifact = read_distillation(distillation())
    arms = distilled_arms(artifact, "whole future, exact")
    own, control = arms["own token, exact"][0], arms["whole future, exact"][0]
    values = artifact.finals["own token, exact"][0]
    best = np.log(values[:, :2]).mean(1).argmin()
    assert own.rate == artifact.learning_rates[best]
    differences = np.log(values[best, 2:]) - np.log(control.kl)
    assert own.log_ratio.value == pytest.approx(differences.mean())
    assert own.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert own.p <= own.p_adjusted <= 99 * own.p + 1e-12
    regrets = regret(arms)
    assert regrets["whole future, exact"] == pytest.approx(1)
    ratios = [np.exp(np.log(one.kl).mean()) for one in arms["own token, exact"]]
    least = [np.exp(np.log(one.kl).mean()) for one in arms["whole future, exact"]]
    assert regrets["own token, exact"] == pytest.approx(max(np.array(ratios) / least))
