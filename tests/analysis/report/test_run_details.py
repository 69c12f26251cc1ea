"""Sections on completions, hyperparameters and evaluations of runs."""

import json

import numpy as np
import pytest
from synthetic import write_sweep

from analysis.checks import load_sweep
from analysis.design.cells import cell_seed
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.sections.runs import completions, hyperparameters
from analysis.report.sections.tradeoff import landmarks


def with_details(point, made):
    arm, index, replicate = point
    texts = {"text_at_start": "The film", "text": f"The film by {arm} {index} {replicate}"}
    settings = {"kl.beta": index, "model.learning_rate": 0.1, "kl.estimator.class_path": arm}
    return {
        **made,
        "completions": [{**texts, "reward_at_start": 0.5, "reward": replicate + 0.25}],
        "settings": settings,
    }


def test_every_arm_has_the_same_prompts(tmp_path):
    section = completions(load_assessment(write_sweep(tmp_path, replicates=3, edit=with_details)))
    (table,) = section.tables
    assert table.header == ("Before", "After, MonteCarlo", "After, RaoBlackwell")
    assert table.rows == [
        ("The film [0.50]", "The film by MonteCarlo 1 0 [0.25]", "The film by RaoBlackwell 1 0 [0.25]")
    ]
    assert len(section.details) == 2
    assert f"replicate 0, seed {cell_seed(0, 'rloo', 1, 0)}" in section.tables[0].caption


def test_hyperparameters_that_differ_between_arms_are_shown_separately(tmp_path):
    section = hyperparameters(load_assessment(write_sweep(tmp_path, edit=with_details)))
    (different,), (shared,) = section.tables, section.details
    assert different.rows == [("kl.estimator.class_path", "MonteCarlo", "RaoBlackwell")]
    assert shared.rows == [("model.learning_rate", "0.1")]


def test_runs_without_details_have_no_section(tmp_path):
    assessment = load_assessment(write_sweep(tmp_path))
    assert completions(assessment) is None
    assert hyperparameters(assessment) is None


def test_the_start_of_the_runs_is_marked_in_the_figure_if_there_is_no_warm_start(tmp_path):
    runs = write_sweep(tmp_path, replicates=2, betas={0: 0.1})
    for path in (runs / "results").glob("*.json"):
        if json.loads(path.read_bytes())["cell"]["arm"] is None:
            path.unlink()
    sweep = load_sweep(runs)
    firsts = [[run.curves[f"val/{key}"].value[0] for run in sweep.grid.values()] for key in ("kl", "reward")]
    assert landmarks(sweep) == [("start", *(pytest.approx(np.mean(values)) for values in firsts))]
    assert "start</text" in build(runs).read_text("utf-8").replace("%3C", "<")
