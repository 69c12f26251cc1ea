"""What `analysis plan` promises of a design."""

from dataclasses import replace

import pytest
import yaml
from synthetic import write_sweep

from analysis.cli import main
from analysis.design import read_plan
from analysis.report.power import power
from analysis.results.arm import Arm
from analysis.stats.power import rejection_rates
from analysis.stats.scenario import STANDARD
from analysis.sweep import lock
from lit_klrb.errors import ConfigurationError

PLAN = {
    "name": "planned",
    "directory": "runs/planned",
    "module": "lit_klrb.schema",
    "stages": {"rloo": {"config": "rloo.yaml"}},
    "grid": {
        "estimator": ["MonteCarlo", "RaoBlackwell"],
        "beta": {0: 0.05, 1: 0.1, 2: 0.2},
        "replicates": 8,
    },
    "primary": {"control": "MonteCarlo"},
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rloo.yaml").write_text("model: {}")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    return read_plan(tmp_path / "plan.yaml")


def test_power_is_that_of_the_planned_design_at_holms_first_step(plan):
    design = replace(
        STANDARD,
        betas=tuple(STANDARD.betas[i] for i in (0, 2, 5)),
        log_kl=tuple(STANDARD.log_kl[i] for i in (0, 2, 5)),
        replicates=8,
    )
    expected = rejection_rates(design, lift=0.5, alpha=0.05)["objective"]
    lines = power(plan, None)
    assert "assumed, no pilot" in lines[0]
    assert "3 betas x 8 replicates; level 0.05" in lines[0]
    assert f"0.0500 more reward (0.5 SD): found with power {expected}; 80% needs" in lines[3]


def test_a_pilot_brings_its_own_spreads(plan, tmp_path):
    pilot = write_sweep(tmp_path / "pilot", replicates=6)
    lines = power(plan, pilot)
    assert f"from RaoBlackwell against MonteCarlo in {pilot}" in lines[0]
    assert lines != power(plan, None)


def test_a_pilot_without_matched_runs_is_refused(plan, tmp_path):
    pilot = write_sweep(tmp_path / "pilot", estimators=("MonteCarlo", "K3Reward"))
    with pytest.raises(
        ConfigurationError, match="has no two matched runs at each beta of MonteCarlo and one of"
    ):
        power(plan, pilot)


def test_the_command_prints_it(plan, tmp_path, capsys, monkeypatch):
    known = {label: Arm() for label in plan.grid.arms}
    monkeypatch.setitem(lock.__globals__, "examine", lambda plan, cells: known)
    pilot = write_sweep(tmp_path / "pilot", replicates=6)
    assert main(["plan", "--config", "plan.yaml", "--pilot", str(pilot)]) == 0
    assert "power (from RaoBlackwell against MonteCarlo in" in capsys.readouterr().out
