"""The power that `analysis plan` prints."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from statsmodels.stats.power import TTestPower
from synthetic import BETAS, edit_plan, write_sweep

from analysis.checks import load_sweep
from analysis.cli import main
from analysis.design import read_plan
from analysis.report.assessment import load_assessment
from analysis.report.matching import match
from analysis.report.power import power, warnings
from analysis.results.artifacts import GradientStudy
from analysis.results.plan import Block
from analysis.results.records import Arm
from analysis.stats.prompts import noise_share
from analysis.stats.text import number
from analysis.sweep import lock
from lit_klrb.errors import ConfigurationError

PLAN = {
    "name": "planned",
    "directory": "runs/planned",
    "module": "lit_klrb.schema",
    "stages": {"rloo": {"config": "rloo.yaml"}},
    "grid": {"arms": ["MonteCarlo", "RaoBlackwell"], "beta": {0: 0.05, 1: 0.1, 2: 0.2}, "replicates": 8},
    "primary": {"control": "MonteCarlo"},
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rloo.yaml").write_text("model: {}")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    return read_plan(tmp_path / "plan.yaml")


def test_without_a_pilot_it_is_in_standard_deviations_of_a_difference(plan):
    test, reach = power(plan, None)
    assert test == "  swap test of 24 pairs, level 0.05"
    effect = float(reach.split(" SDs")[0].split()[-1])
    assert TTestPower().power(effect, 24, 0.05) == pytest.approx(0.8, abs=2e-3)


@pytest.mark.parametrize(("blocks", "betas"), [(0, 3), (0, 1), (4, 3)])
def test_plan_and_page_detect_the_same_difference(plan, tmp_path, blocks, betas):
    chosen = dict([*BETAS.items()][:betas])
    pilot = write_sweep(tmp_path / "pilot", replicates=8, betas=chosen, blocks=blocks)
    assessment = load_assessment(pilot)
    test, source, detected, half, *_ = power(assessment.sweep.plan, pilot)
    assert (
        source
        == f"power, from {8 * betas} of {8 * betas} pairs of RaoBlackwell against MonteCarlo in {pilot}"
    )
    reach = assessment.comparisons[0].primary.detectable
    assert detected == f"  difference in J detected with 80 % power: {number(reach)} reward units"
    assert ("swap test of 24 pairs" in test) == (betas > 1 and not blocks)
    assert ("t test over 4 blocks" in test) == bool(blocks)
    assert half.startswith(f"  half of it, {number(reach / 2)}, needs ")
    assert half.endswith("blocks") == bool(blocks)


def test_the_replicates_that_half_of_it_needs_detect_it(plan, tmp_path):
    pilot = write_sweep(tmp_path, replicates=8)
    _, _, detected, half, *_ = power(plan, pilot)
    needed = int(half.split()[-2])
    assert needed > 20
    larger = replace(plan, grid=replace(plan.grid, replicates=needed))
    _, _, again, *_ = power(larger, pilot)
    reach, then = (float(line.split()[-3]) for line in (detected, again))
    assert then <= reach / 2 < 1.1 * then


def test_a_pilot_without_blocks_says_so(plan, tmp_path):
    planned = replace(plan, grid=replace(plan.grid, blocks={name: Block() for name in "abcd"}))
    pilot = write_sweep(tmp_path / "pilot", replicates=8)
    _, _, detected, *_ = power(planned, pilot)
    assert detected.endswith("reward units if blocks do not differ, which the pilot does not show")


def test_a_plan_that_cannot_reject_says_what_it_needs(plan):
    few = replace(plan, grid=replace(plan.grid, replicates=1))
    test, cannot = power(few, None)
    assert test == "  swap test of 3 pairs, level 0.05"
    assert cannot == "  3 pairs CANNOT reach p ≤ 0.05 (best possible: 0.25); needs 2 replicates"


def test_a_plan_that_the_kl_decides_detects_nats(plan, tmp_path):
    by_kl = replace(plan, primary=replace(plan.primary, outcome="kl"))
    pilot = write_sweep(tmp_path / "pilot", replicates=8, primary={"outcome": "kl"})
    lines = [*power(by_kl, pilot)]
    reach = load_assessment(pilot).comparisons[0].primary.detectable
    assert lines[2] == f"  difference in the KL detected with 80 % power: {number(reach)} nats"
    assert not [line for line in lines if "reward" in line or "WARNING" in line]
    with pytest.raises(ConfigurationError, match="decides by the KL alone, so it has no spread of rewards"):
        [*power(plan, pilot)]


def test_the_share_of_evaluation_noise_in_a_pilot_is_that_of_its_pairs(plan, tmp_path):
    def edit(point, made):
        reward, kl, spread = made["final"]["reward"], made["final"]["kl"], 0.2 * (-1) ** point[2]
        spread *= point[0] == "RaoBlackwell"
        made["final"] |= {"reward_se": abs(spread), "kl_se": 0.0}
        return made | {"prompts": {"reward": [reward - spread, reward + spread], "kl": [kl, kl]}}

    pilot = write_sweep(tmp_path, edit=edit)
    prompts = match(load_sweep(pilot), "RaoBlackwell", "MonteCarlo").prompts.reshape(3, 4, 2)
    (line,) = [line for line in power(plan, pilot) if "evaluation noise" in line]
    assert line.startswith(f"  evaluation noise is {noise_share([*prompts])} of the variance")
    assert not [line for line in power(plan, None) if "evaluation noise" in line]


def test_a_pilot_warns_of_designs_that_cannot_show_a_difference(plan, tmp_path):
    """J decreases at the third beta; the study's gradients are almost entirely those of the reward."""

    def edit(point, made):
        reward = made["curves"]["val/reward"]["value"]
        kl = made["curves"]["val/kl"]["value"]
        beta, sign = BETAS[point[1]], -1 if point[1] == 2 else 1
        reward[0] = made["final"]["reward"] + beta * (kl[0] - made["final"]["kl"]) - sign
        return made

    quiet = load_sweep(write_sweep(tmp_path / "quiet", replicates=3, edit=edit, studied=[0.1]))
    (line,) = warnings(quiet)
    assert line.startswith("at beta 0.2 J does not rise in training: −1.00, 95% CI")
    assert line.endswith("over 6 runs")
    run, study = quiet.studies(GradientStudy)[0]
    gram = study.snapshots[0].gram
    batches = study.batches
    # all estimators add a hundredth of an independent gradient to the reward's
    rng = np.random.default_rng(0)
    reward, noise = rng.normal(size=(2, batches, 40))
    gradients = np.concatenate([reward, reward + 0.1 * noise, reward + 0.1 * noise])
    drowned = [replace(one, gram=gradients @ gradients.T) for one in study.snapshots]
    assert gram.shape == drowned[0].gram.shape
    run = replace(run, studies=(replace(study, snapshots=drowned),))
    others = tuple(one for one in quiet.runs if not one.studies)
    found = list(warnings(replace(quiet, runs=(*others, run))))
    share = np.trace(np.cov(0.1 * noise.T)) / np.trace(np.cov((reward + 0.1 * noise).T))
    assert f"under MonteCarlo has at most {share:.1%} of the whole gradient's noise (beta 0.1)" in found[1]


def test_a_pilot_without_matched_runs_is_refused(plan, tmp_path):
    pilot = write_sweep(tmp_path / "pilot", estimators=("MonteCarlo", "K3Reward"))
    with pytest.raises(
        ConfigurationError, match="has no two matched runs at each beta of MonteCarlo and one of"
    ):
        [*power(plan, pilot)]


def test_a_pilot_that_was_edited_is_refused(plan, tmp_path):
    pilot = write_sweep(tmp_path / "pilot")
    edit_plan(pilot, lambda document: document["content"]["plan"]["primary"].update(alpha=0.2), rehash=False)
    with pytest.raises(ConfigurationError, match=r"cannot be trusted: plan.json: does not have the hash"):
        [*power(plan, pilot)]


def test_the_command_prints_it(plan, tmp_path, capsys, monkeypatch):
    known = {label: Arm() for label in plan.grid.arms}
    monkeypatch.setitem(lock.__globals__, "examine", lambda plan, cells: known)
    pilot = write_sweep(tmp_path / "pilot", replicates=6)
    assert main(["plan", "--config", "plan.yaml", "--pilot", str(pilot)]) == 0
    out = capsys.readouterr().out
    assert "power, from 18 of 18 pairs of RaoBlackwell against MonteCarlo in" in out
