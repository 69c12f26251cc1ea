"""Tuned sweeps: the section on the choice of rates, and intervals that include it."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from synthetic import ESTIMATORS, cell, digest, id_of, publish, result, write_sweep

from analysis.cli import main
from analysis.design.cells import cell_seed
from analysis.design.rates import choice_of
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.matching import match, tuned_arms
from analysis.results import Cell
from analysis.results.locked import LockedPlan, encode_plan, hash_of
from analysis.results.records import read_run
from analysis.stats import Rules, compare
from analysis.stats.tuning import regret_variance, resampled
from replication.__main__ import main as replication

BETAS = {0: 0.1, 1: 0.3}
RATES = [1e-4, 2e-4, 4e-4]
BEST = {"MonteCarlo": 2e-4, "RaoBlackwell": 4e-4}


def tuned(runs, *, noise=0.3, diverged=(), lift=0.3):
    """A sweep of two arms whose best rates are BEST, with a tuning stage of four replicates."""
    record = {"rates": RATES, "replicates": 4, "key": "model.learning_rate"}
    starts = [id_of(cell(stage)) for stage in ("sft", "dpo")]
    rng, made = np.random.default_rng(2), []
    for arm in ESTIMATORS:
        for rate in RATES:
            for index, beta in BETAS.items():
                for replicate in range(4):
                    place = {"beta": beta, "beta_index": index, "replicate": replicate}
                    where = {
                        **{key: None for key in ("arm", "beta", "beta_index", "replicate")},
                        **{"stage": "tuning", "seed": cell_seed(0, "tuning", index, replicate), "argv": []},
                        **{"needs": starts, "overrides": {"kl.estimator": arm, record["key"]: rate}},
                        "trial": {"arm": arm, "rate": rate, **place},
                    }
                    final = {"reward": 1 - np.log(rate / BEST[arm]) ** 2 + noise * rng.normal(), "kl": 1.0}
                    state = "diverged" if (arm, rate) in diverged else "done"
                    made.append(result(where, final, state=state))
    tuned_by = {
        arm: digest([one["id"] for one in made if one["cell"]["trial"]["arm"] == arm]) for arm in ESTIMATORS
    }
    write_sweep(runs, betas=BETAS, replicates=6, lift={"RaoBlackwell": lift}, tuned_by=tuned_by)
    document = json.loads((runs / "plan.json").read_bytes())
    document["content"]["plan"]["tuning"] = document["history"][-1]["plan"]["tuning"] = record
    for one in made:
        publish(runs / "results", one)
        document["cells"].append({"id": one["id"], **one["cell"]})
    document["hash"] = hash_of(document)
    (runs / "plan.json").write_bytes(encode_plan(document))
    locked = LockedPlan.read(runs / "plan.json")
    trials = [read_run(path) for path in sorted((runs / "results").glob("*.json"))]
    document["choice"] = asdict(choice_of(locked.plan, trials))
    (runs / "plan.json").write_bytes(encode_plan(document))
    return runs


def test_the_page_shows_the_choice_and_can_be_verified(tmp_path, capsys, request):
    page = build(tuned(tmp_path, noise=0.01)).read_text("utf-8")
    assert "Tuned rates" in page
    assert "mathdefault" not in page, "labels of axes are plain text"
    assert "RaoBlackwell is at the largest rate tried, 0.0004: its optimum may lie beyond" in page
    assert "the next two rates to try are 0.0008 and 0.0016" in page
    numbers = json.loads((tmp_path / "results.json").read_text())["sections"]["tuning"]
    assert {arm: numbers[arm]["chosen"] for arm in ESTIMATORS} == BEST
    request.getfixturevalue("undrawn")
    build(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    assert replication(["publish", str(tmp_path), "--output", str(tmp_path / "shared")]) == 0
    assert main(["verify", str(tmp_path / "shared")]) == 0


def test_the_interval_of_the_comparison_includes_the_choice(tmp_path):
    found = load_assessment(tuned(tmp_path, noise=2.0))
    (comparison,) = found.comparisons
    verdict, added = comparison.primary, regret_variance(tuned_arms(found.sweep), *ESTIMATORS)
    plain = write_sweep(tmp_path / "plain", betas=BETAS, replicates=6, lift={"RaoBlackwell": 0.3})
    (untuned,) = load_assessment(plain).comparisons
    before = untuned.primary
    assert added > 0.001
    assert verdict.estimate.value == before.estimate.value
    assert verdict.estimate.standard_error**2 == pytest.approx(before.estimate.standard_error**2 + added)
    assert verdict.test.p_value > before.test.p_value
    assert before.outcome.name == "BETTER"
    assert verdict.outcome.name == "INCONCLUSIVE"
    assert "RaoBlackwell at the largest rate tried" in verdict.sentence
    assert "the interval includes the choice of the rate of MonteCarlo" in verdict.sentence


def test_a_rate_that_collapses_is_not_on_the_curve_of_the_logarithm():
    """Three log rates with a flat optimum in the middle, and a KL of 60 instead of 8 at a fourth."""
    rng = np.random.default_rng(0)
    kls = np.array([9.0, 8.0, 9.0, 60.0]) * np.exp(0.02 * rng.normal(size=(4, 4)))
    drawn = rng.integers(4, size=(500, 4))
    kept, best, own = resampled(-np.log(kls), np.log([1.0, 3.0, 9.0, 27.0]), 1, drawn)
    assert kept.tolist() == [True, True, True, False]
    assert np.sqrt(((best - own) ** 2).mean()) < 0.02
    alike, *_ = resampled(rng.normal(size=(4, 5)), np.log([1.0, 3.0, 9.0, 27.0, 81.0]), 1, drawn)
    assert alike.all(), "none is clearly worse"


def test_the_chosen_rate_at_an_edge_adds_nothing(tmp_path):
    sweep = load_assessment(tuned(tmp_path, noise=0.5)).sweep
    arms = tuned_arms(sweep)
    assert (arms["RaoBlackwell"].edge, arms["MonteCarlo"].edge) == ("largest", "")
    assert not arms["RaoBlackwell"].regrets.any()
    assert arms["MonteCarlo"].loss > 0
    both = {"MonteCarlo": replace(arms["MonteCarlo"], edge="smallest"), "RaoBlackwell": arms["RaoBlackwell"]}
    pairs = match(sweep, "RaoBlackwell", "MonteCarlo")
    found = compare([pairs], Rules(tuned=both))[0].primary
    assert found.note == "RaoBlackwell at the largest rate tried; MonteCarlo at the smallest rate tried"


def test_a_rate_at_which_a_run_diverged_is_not_chosen(tmp_path):
    sweep = load_assessment(tuned(tmp_path, noise=0.01, diverged=[("RaoBlackwell", 4e-4)])).sweep
    assert sweep.locked.rates == {"MonteCarlo": 2e-4, "RaoBlackwell": 2e-4}


def test_a_removed_result_of_the_tuning_stage_gives_no_verdict(tmp_path):
    tuned(tmp_path)
    for path in (tmp_path / "results").glob("*.json"):
        if Cell.of_record("", json.loads(path.read_bytes())["cell"]).trial:
            path.unlink()
            break
    assert load_assessment(tmp_path).withheld
