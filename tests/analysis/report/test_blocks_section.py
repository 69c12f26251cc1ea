"""Sweeps with blocks: the page, its numbers, and what is verified."""

import json

import numpy as np
import pytest
from reading import Page, grid_results
from scipy import stats
from synthetic import edit_plan, write_sweep

from analysis.cli import main
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.matching import start_of
from analysis.report.power import power
from analysis.stats.text import signed
from replication.__main__ import main as replication

LIFT = {"RaoBlackwell": 0.4}


def shift(point, made):
    """An effect of the block on the treatment."""
    if point[0] == "RaoBlackwell":
        made["final"]["reward"] += (0.0, 0.3, -0.2)[point[2] % 3]
    return made


def objective(result):
    return result["final"]["reward"] - result["cell"]["beta"] * result["final"]["kl"]


def test_the_verdict_is_over_blocks_and_each_block_is_shown(tmp_path, undrawn, capsys):
    runs = write_sweep(tmp_path / "runs", replicates=6, blocks=3, lift=LIFT, edit=shift)
    text = Page(build(runs).read_text("utf-8")).text
    found = grid_results(runs)
    means = [
        np.mean(
            [
                objective(found["RaoBlackwell", index, replicate])
                - objective(found["MonteCarlo", index, replicate])
                for index in range(3)
                for replicate in (block, block + 3)
            ]
        )
        for block in range(3)
    ]
    numbers = json.loads((runs / "results.json").read_text())
    assert list(numbers["sections"]["blocks"]["RaoBlackwell"]) == ["dpo-0", "dpo-1", "dpo-2"]
    assert [*numbers["sections"]["blocks"]["RaoBlackwell"].values()] == pytest.approx(means)
    expected = stats.ttest_1samp(means, 0.0)
    (comparison,) = numbers["comparisons"]
    assert comparison["objective"]["p"] == pytest.approx(expected.pvalue)
    assert comparison["decided_by"] == "block_test"
    assert "The replicates are of 3 blocks (dpo-0, dpo-1, dpo-2). The verdict is about others" in text
    assert "are conditional on these, and do not apply to other checkpoints" not in text
    assert "such as a collapse, could still occur in up to 71% of others" in text
    assert "policy = dpo-1" in text
    assert "A single β or block has a t interval of the same level, not corrected." in text
    assert f"block dpo-1 {signed(means[1])}" in text
    assert main(["verify", str(runs)]) == 0
    assert replication(["publish", str(runs), "--output", str(tmp_path / "shared")]) == 0
    assert main(["verify", str(tmp_path / "shared")]) == 0


def test_the_page_of_two_blocks_is_about_these_two(tmp_path, undrawn):
    text = Page(build(write_sweep(tmp_path, blocks=2, lift=LIFT)).read_text("utf-8")).text
    assert "All statements hold on these two blocks only." in text
    assert "RaoBlackwell better +" in text


def test_blocks_in_another_order_than_that_of_the_cells_give_no_verdict(tmp_path):
    write_sweep(tmp_path, replicates=3, blocks=3)

    def reorder(document):
        for plan in (document["content"]["plan"], document["history"][-1]["plan"]):
            plan["grid"]["blocks"] = dict(reversed(plan["grid"]["blocks"].items()))

    edit_plan(tmp_path, reorder)
    (problem,) = load_assessment(tmp_path).sweep.invalid
    assert problem == "plan.json: rloo MonteCarlo beta=0.05 #0: it does not start from sft and dpo-2"


def test_blocks_may_end_at_different_steps_and_arms_may_not(tmp_path):
    def shorter(point, made):
        if point[2] % 3 == 1:
            made["curves"] = {
                key: {name: values[:3] for name, values in curve.items()}
                for key, curve in made["curves"].items()
            }
        return made

    assert not load_assessment(
        write_sweep(tmp_path / "a", replicates=6, blocks=3, edit=shorter)
    ).sweep.invalid
    assert load_assessment(write_sweep(tmp_path / "b", replicates=6, edit=shorter)).sweep.invalid


def test_the_start_is_the_mean_of_the_warm_starts(tmp_path):
    def without_first(point, made):
        made["curves"] = {key: curve for key, curve in made["curves"].items() if key.startswith("train/")}
        return made

    sweep = load_assessment(write_sweep(tmp_path, replicates=3, blocks=3, edit=without_first)).sweep
    assert start_of(sweep)["reward"] == pytest.approx(0.6)


def test_the_power_of_swaps_of_pairs_does_not_depend_on_the_blocks_of_a_pilot(tmp_path):
    (plain, blocked) = (
        write_sweep(tmp_path / name, replicates=6, blocks=blocks, lift=LIFT, edit=shift)
        for name, blocks in (("pilot", 0), ("blocks", 3))
    )
    plan = load_assessment(plain).sweep.plan
    expected = [*power(plan, plain)]
    assert [line.replace(str(blocked), str(plain)) for line in power(plan, blocked)] == expected


def test_a_block_of_a_single_pair_has_no_interval_to_be_mentioned(tmp_path, undrawn):
    runs = write_sweep(tmp_path / "runs", replicates=3, blocks=3, betas={0: 0.1}, lift=LIFT, edit=shift)
    assert "has a t interval of the same level" not in Page(build(runs).read_text("utf-8")).text
