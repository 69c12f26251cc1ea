"""The power that `analysis plan` prints."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from synthetic import BETAS, edit_plan, write_sweep

from analysis.checks import load_sweep
from analysis.cli import main
from analysis.design import read_plan
from analysis.report.assessment import load_assessment
from analysis.report.matching import match
from analysis.report.power import power, warnings
from analysis.report.sections import certificates, evaluation_noise
from analysis.results.artifacts import GradientStudy
from analysis.results.plan import Block
from analysis.results.records import Arm
from analysis.stats.power import detectable_over_blocks, primary_rate
from analysis.stats.scenario import STANDARD, scenario_of
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


def test_power_is_that_of_the_planned_design_at_the_level_of_a_comparison(plan):
    design = replace(
        STANDARD,
        betas=tuple(STANDARD.betas[i] for i in (0, 2, 5)),
        log_kl=tuple(STANDARD.log_kl[i] for i in (0, 2, 5)),
        replicates=8,
    )
    expected = primary_rate(design, lift=0.5)
    lines = power(plan, None)
    assert "assumed, no pilot" in lines[0]
    assert "3 betas x 8 replicates; level 0.05" in lines[0]
    assert f"0.0500 more reward (0.5 SD): detected with power {expected}; 80% needs" in lines[3]


def test_plan_and_page_have_the_same_power(plan, tmp_path):
    pilot = write_sweep(tmp_path / "pilot", replicates=8)
    lines = power(plan, pilot)
    assert f"from RaoBlackwell against MonteCarlo in {pilot}" in lines[0]
    assessment = load_assessment(pilot)
    page = certificates(assessment)
    found = page.numbers["RaoBlackwell"]
    ((*_, size, half, whole, reach),) = page.tables[0].rows
    assert lines[1].endswith(f"rejects {size}")
    assert f"(0.5 SD): detected with power {half};" in lines[3]
    assert f"(1 SD): detected with power {whole};" in lines[4]
    assert f"80% power: {reach} reward units" in lines[5]
    verdict = assessment.comparisons[0].primary
    assert found["detectable"] == pytest.approx(verdict.estimate.detectable(plan.level))


def test_with_blocks_the_spread_is_that_of_the_pilots_pairs(plan, tmp_path):
    planned = replace(plan, grid=replace(plan.grid, blocks={name: Block() for name in "abcd"}))
    pilot = write_sweep(tmp_path / "pilot", replicates=8)
    first, *lines = power(planned, pilot)
    pairs = match(load_sweep(pilot), "RaoBlackwell", "MonteCarlo")
    own, simulated = (
        detectable_over_blocks(scenario_of(pairs), 4, planned.level, given) for given in (pairs, None)
    )
    assert own != simulated
    assert (
        first == f"power (from RaoBlackwell against MonteCarlo in {pilot}; t test over 4 blocks, level 0.05)"
    )
    for line, (spread, reach) in zip(lines, own.items(), strict=False):
        assert f"80% power: {number(reach)} reward units" in line
        assert f"between blocks by SD {number(spread)} (" in line


def test_a_plan_that_the_kl_decides_has_the_power_of_its_page(plan, tmp_path):
    def edit(point, made):
        made["final"]["kl"] *= 0.8 ** (point[0] == "RaoBlackwell")
        return made

    by_kl = replace(plan, primary=replace(plan.primary, outcome="kl"))
    pilot = write_sweep(tmp_path / "pilot", replicates=8, edit=edit, primary={"outcome": "kl"})
    lines = power(by_kl, pilot)
    page = certificates(load_assessment(pilot))
    ((_, sd, size, half, whole, reach),) = page.tables[0].rows
    assert f": log KL spread {sd} between replicates, correlation" in lines[0]
    assert lines[1] == f"  no difference: the test of the KL rejects {size}"
    assert f" times the KL (0.5 SD of log KL): detected with power {half}; 80% needs" in lines[3]
    assert f"(1 SD of log KL): detected with power {whole};" in lines[4]
    assert f"ratio of KLs detected with 80% power: {reach} or less, " in lines[5]
    assert "J" not in page.title
    assumed = power(by_kl, None)
    assert assumed[0].startswith("power (assumed, no pilot: log KL spread 0.150 between replicates, ")
    assert not [line for line in lines + assumed if "reward" in line or "WARNING" in line]
    with pytest.raises(ConfigurationError, match="decides by the KL alone, so it has no spread of rewards"):
        power(plan, pilot)


def test_the_share_of_evaluation_noise_in_a_pilot_is_that_of_its_page(plan, tmp_path):
    def edit(point, made):
        reward, kl, spread = made["final"]["reward"], made["final"]["kl"], 0.2 * (-1) ** point[2]
        spread *= point[0] == "RaoBlackwell"
        return made | {"prompts": {"reward": [reward - spread, reward + spread], "kl": [kl, kl]}}

    pilot = write_sweep(tmp_path, edit=edit)
    share = evaluation_noise(load_assessment(pilot)).numbers["RaoBlackwell"]["all"]["share"]
    (line,) = [line for line in power(plan, pilot) if "evaluation noise" in line]
    assert line.startswith(f"  evaluation noise is {share:.0%} (")
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
        power(plan, pilot)


def test_a_pilot_that_was_edited_is_refused(plan, tmp_path):
    pilot = write_sweep(tmp_path / "pilot")
    edit_plan(pilot, lambda document: document["content"]["plan"]["primary"].update(alpha=0.2), rehash=False)
    with pytest.raises(ConfigurationError, match=r"cannot be trusted: plan.json: does not have the hash"):
        power(plan, pilot)


def test_the_command_prints_it(plan, tmp_path, capsys, monkeypatch):
    known = {label: Arm() for label in plan.grid.arms}
    monkeypatch.setitem(lock.__globals__, "examine", lambda plan, cells: known)
    pilot = write_sweep(tmp_path / "pilot", replicates=6)
    assert main(["plan", "--config", "plan.yaml", "--pilot", str(pilot)]) == 0
    assert "power (from RaoBlackwell against MonteCarlo in" in capsys.readouterr().out
