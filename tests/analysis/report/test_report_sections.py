"""Sections of the page: figures, studies, certificates, hypervolume, stability."""

import json
import math
from importlib import import_module

import numpy as np
import pytest
from reading import FIVE, SMALL, Page, grid_results, numbers, page_of, text_of
from scipy import stats
from synthetic import cell, diverge, edit_plan, publish, result, write_sweep

from analysis.checks import load_sweep
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.sections import outcomes
from analysis.report.sections.gradient_noise import gradient_noise
from analysis.report.sections.outcomes import forests
from analysis.report.sections.tradeoff import landmarks
from analysis.report.verify import verify
from analysis.stats.frontier import hypervolume_differences
from analysis.stats.kl_values import reference_bias

# The package's attributes of these names are the functions.
certificates = import_module("analysis.report.sections.checks")
estimation = import_module("analysis.report.sections.kl_values")


def test_units_are_never_mixed_in_one_figure(tmp_path):
    runs = write_sweep(tmp_path, estimators=FIVE[:3], edit=diverge(("RaoBlackwell", 0, 0)), **SMALL)
    figures = forests(load_assessment(runs))
    assert len(figures) == 2
    units = [{row[1].partition(" (")[2] for row in figure.table.rows} for figure in figures]
    assert units == [{"rank among the runs of its beta (0 to 1))"}, {"reward units)"}]


def later_version(**version):
    """An edit of a plan: a version locked after the first, with the same content."""

    def edit(document):
        (first,) = document["history"]
        document["history"].append({**first, "previous": document["hash"], **version})

    return edit


def test_the_plan_sets_alpha_and_its_changes_are_shown(tmp_path):
    runs = write_sweep(tmp_path, primary={"alpha": 0.2}, **SMALL)
    (table,) = outcomes(load_assessment(runs)).details
    assert "two-sided at 0.2" in table.caption
    edit_plan(runs, later_version(published=7, changes=["plan.primary.alpha: 0.05 -> 0.2"]))
    assert "up to 7 results could have been seen: plan.primary.alpha: 0.05 -> 0.2" in text_of(runs)


def test_landmarks_are_named(tmp_path):
    runs = write_sweep(tmp_path, **SMALL)
    assert landmarks(load_sweep(runs)) == [("reference", 0.0, 0.1), ("after DPO", 0.4, 0.5)]
    assert "after DPO" in build(runs).read_text("utf-8").replace("%20", " ")
    publish(runs / "results", result(cell("warm", seed=1), {"reward": None, "kl": None}))
    assert len(landmarks(load_sweep(runs))) == 2


def test_studies_have_their_own_sections(better, tmp_path, undrawn):
    without = Page((better / "report.html").read_text("utf-8"))
    assert not {"estimation", "gradient_noise"} & set(without.ids)
    runs = write_sweep(tmp_path, studied=[0.1], **SMALL)
    page = Page(build(runs).read_text("utf-8"))
    assert {"estimation", "gradient_noise"} <= set(page.ids)
    assert "10 completions of each of 6 prompts" in page.text
    # Two estimators at two snapshots are compared with the reference
    assert "Bias 97.5% CI Verdict" in page.text
    assert "inconclusive: fewer than 64 batches" in page.text
    assert len(landmarks(load_sweep(runs))) == 2, "a study is no warm start"
    assert verify(runs).differences == []
    numbers = json.loads((runs / "results.json").read_text())["sections"]["estimation"]["20"]
    assert numbers["rb"]["log_variance_ratio"] == pytest.approx(-2 * math.log(4))


def test_the_noise_of_gradients_of_each_run_with_the_study_is_shown(tmp_path, undrawn):
    runs = write_sweep(tmp_path, studied=[0.1, 2.0], **SMALL)
    section = gradient_noise(load_assessment(runs))
    betas = [finding["beta"] for finding in section.numbers["findings"]]
    assert sorted(set(betas)) == [0.1, 2.0]
    assert len(section.figures) == len(section.tables) == 2
    assert section.tables[1].caption.startswith("β = 2. ")
    (cell,) = (row[4] for row in section.tables[0].rows if row[:3] == ("10", "KL", "RaoBlackwell"))
    (number,) = (
        row["norm_variance"]
        for row in section.numbers["absolute"]
        if (row["beta"], row["step"], row["term"], row["estimator"]) == (0.1, 10, "KL", "RaoBlackwell")
    )
    assert float(cell) == pytest.approx(number, rel=0.01)


def test_a_heavy_tail_is_named_beside_the_bias():
    draws = np.random.default_rng(0).lognormal(sigma=[[0.1], [6.0]], size=(2, 1000))
    light, heavy = (estimation._bias(reference_bias(values, np.ones(1000)), 0.05)[-1] for values in draws)
    assert heavy.startswith("inconclusive (heavy tail, index ")
    assert "tail" not in light


def test_the_primary_test_is_certified_for_the_design_of_the_sweep(better, tmp_path, monkeypatch, undrawn):
    numbers = certificates.certificates(load_assessment(better)).numbers["RaoBlackwell"]
    assert abs(numbers["0.0"] - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 1000)
    assert numbers["0.0"] < numbers["0.5"] < numbers["1.0"]
    assert "Type-I error" in Page((better / "report.html").read_text("utf-8")).text
    assert "certificates" not in page_of(tmp_path, replicates=1).ids


def test_hypervolume_and_stability_are_reported(tmp_path, undrawn):
    steady = write_sweep(tmp_path, lift={"RaoBlackwell": 0.9}, replicates=10)
    page = Page(build(steady).read_text("utf-8"))
    numbers = json.loads((steady / "results.json").read_text())["sections"]
    found = next(
        one for one in numbers["verdict"]["verdicts"]["RaoBlackwell"] if one["claim"] == "hypervolume"
    )
    assert found["outcome"] == "better"
    pairs = load_assessment(steady).comparisons[0].pairs
    corner = float(pairs.kl.max()), float(pairs.reward.min())
    expected = hypervolume_differences(pairs, corner).mean()
    assert found["estimate"] == pytest.approx(expected)
    assert "more hypervolume" in page.text
    edit = diverge(("MonteCarlo", 2, 0))
    diverged = load_assessment(write_sweep(tmp_path / "diverged", replicates=10, edit=edit))
    (table,) = outcomes(diverged).details
    shown = {test.partition(":")[0]: estimate for test, _, estimate, *_ in table.rows}
    assert shown["collapses"] == "−1.00 runs"
    ratio = math.exp(diverged.comparisons[0].of("spread_reward").estimate.value)
    assert float(shown["spread_reward"].removeprefix("ratio ")) == pytest.approx(ratio, rel=0.01)


def test_numbers_for_programs_are_those_of_the_files(tmp_path):
    runs = write_sweep(tmp_path, replicates=3)
    reported = numbers(runs)
    found = grid_results(runs)
    (arm,) = (arm for arm in reported["arms"] if (arm["label"], arm["beta"]) == ("RaoBlackwell", 0.1))
    finals = [found["RaoBlackwell", 1, replicate]["final"] for replicate in range(3)]
    values = {key: [final[key] for final in finals] for key in ("reward", "kl")}
    values["objective"] = [final["reward"] - 0.1 * final["kl"] for final in finals]
    for key, own in values.items():
        assert arm[key]["mean"] == pytest.approx(np.mean(own))
        assert arm[key]["interval"] == pytest.approx([*stats.ttest_1samp(own, 0).confidence_interval()])
    assert arm["n"] == 3
    starts = [one["curves"]["val/kl"]["value"][0] for one in found.values()]
    assert reported["start"]["kl"] == pytest.approx(sum(starts) / len(starts))
    ratio = reported["comparisons"][0]["kl_ratio"]
    mine, control = (
        [content["final"]["kl"] for place, content in sorted(found.items()) if place[0] == name]
        for name in ("RaoBlackwell", "MonteCarlo")
    )
    assert ratio == pytest.approx(stats.gmean(mine) / stats.gmean(control))
