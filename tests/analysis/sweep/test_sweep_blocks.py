"""A sweep whose warm starts are blocks, from the plan to the verified report."""

import pytest

from analysis.checks import load_sweep
from analysis.cli import main
from analysis.report.matching import warm_starts

STAGES = ("dpo-a", "dpo-b", "dpo-c")


@pytest.mark.usefixtures("capsys")
def test_every_block_runs_from_its_own_warm_start(project):
    inputs = {"model.init_args.reference_path": "sft"}
    warm = {name: {"config": "plan_dpo.yaml", "inputs": inputs} for name in STAGES}
    stages = {"sft": {"config": "plan_sft.yaml"}, **warm}
    stages["rloo"] = {"config": "plan_rloo.yaml", "inputs": inputs}
    blocks = {name: {"inputs": {"model.init_args.policy_path": name}} for name in STAGES}
    blocks["dpo-c"]["overrides"] = {"lr": 0.5}
    path = project.write(stages=stages, grid={"replicates": 3, "blocks": blocks})
    code, output = project.run("sweep", "--config", path, "--workers", "2")
    assert code == 0, output
    sweep = load_sweep(project.directory / "plan")
    assert not sweep.invalid
    assert warm_starts(sweep) == 3
    ids = {run.cell.stage: run.cell.id for run in sweep.landmarks}
    for run in sweep.grid.values():
        assert run.cell.needs == (ids["sft"], ids[STAGES[run.point.replicate]])
    assert main(["report", str(sweep.directory)]) == 0
    assert main(["verify", str(sweep.directory)]) == 0
