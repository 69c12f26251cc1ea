"""Sections of the page: figures, studies, tests and counts."""

import json
import math

import numpy as np
import pytest
from reading import FIVE, SMALL, Page, grid_results, numbers, text_of
from scipy import stats
from synthetic import cell, diverge, edit_plan, publish, result, write_sweep

from analysis.checks import load_sweep
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.sections import outcomes
from analysis.report.sections.gradient_noise import gradient_noise
from analysis.report.sections.kl_values import bias_cells
from analysis.report.sections.outcomes import forests
from analysis.report.sections.tradeoff import landmarks
from analysis.report.sections.training import training_curves
from analysis.report.verify import verify
from analysis.stats.frontier import pooled_share
from analysis.stats.kl_values import reference_bias


def test_units_are_never_mixed_in_one_figure(tmp_path):
    runs = write_sweep(tmp_path, estimators=FIVE[:3], edit=diverge(("RaoBlackwell", 0, 0)), **SMALL)
    figures = forests(load_assessment(runs))
    assert len(figures) == 2
    drawn = [sorted({row[0] for row in figure.table.rows}) for figure in figures]
    assert drawn == [["RaoBlackwell"], ["RaoBlackwellControlVariate"]]
    assert [unit in figure.svg for figure, unit in zip(figures, ("rank among", "reward units"), strict=True)]


def later_version(**version):
    """An edit of a plan: a version locked after the first, with the same content."""

    def edit(document):
        (first,) = document["history"]
        document["history"].append({**first, "previous": document["hash"], **version})

    return edit


def test_the_plan_sets_alpha_and_its_changes_are_shown(tmp_path):
    runs = write_sweep(tmp_path, primary={"alpha": 0.2}, **SMALL)
    table, _ = outcomes(load_assessment(runs)).details
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
    assert "Difference 97.5% CI Verdict" in page.text
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
    light, heavy = (bias_cells("k2", reference_bias(one, np.ones(1000)), 0.05, 0.0)[-1] for one in draws)
    assert heavy.startswith("inconclusive (heavy tail, index ")
    assert "tail" not in light


def test_three_tests_describe_and_the_rest_is_counted(tmp_path, undrawn):
    runs = write_sweep(tmp_path, lift={"RaoBlackwell": 0.9}, replicates=10)
    page = Page(build(runs).read_text("utf-8"))
    found = json.loads((runs / "results.json").read_text())["sections"]
    claims = [one["claim"] for one in found["verdict"]["verdicts"]["RaoBlackwell"]]
    assert claims == ["objective", "kl", "reward", "spread"]
    pairs = load_assessment(runs).comparisons[0].pairs
    share, counted = pooled_share(pairs), found["outcomes"]["RaoBlackwell"]
    assert counted["frontier"] == [share.count, share.total]
    won = ((pairs.kl @ [1, -1] <= 0) & (pairs.reward @ [1, -1] >= 0)).sum()
    assert counted["dominates"] == won > 0
    assert f"RaoBlackwell {share.count} of {share.total} {won} of 30 0 of 30 +0." in page.text
    assert "collapses" in found["verdict"]["rejections"]
    assert "Where one run in ten collapses, and loses what the others gain, it says better in" in page.text


def test_steps_with_less_spread_are_counted(tmp_path, undrawn):
    """The treatment's curves are the control's, with half of their spread at every second step."""
    curves = {}

    def edit(point, made):
        curve = made["curves"]["train/reward"]
        if point[0] == "MonteCarlo":
            curves[point[1:]] = curve["value"]
        else:
            other = curves[point[1:]]
            curve["value"] = [value * (0.5 if step % 2 else 1.5) for step, value in enumerate(other)]
        return made

    runs = write_sweep(tmp_path, edit=edit, replicates=4)
    (figure, *_) = training_curves(load_assessment(runs)).figures
    column = figure.table.header.index("Steps with less SD than MonteCarlo")
    rows = [row for row in figure.table.rows if row[2] == "mean reward"]
    assert {row[0]: row[column] for row in rows} == {"MonteCarlo": "–", "RaoBlackwell": "10 of 20"}


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
