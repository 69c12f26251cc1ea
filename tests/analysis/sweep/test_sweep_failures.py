"""Cells that fail: which are repeated, and how they are listed."""

import json

import pytest
from sweep_project import Project

MISBEHAVIOURS = ["crash", "usage", "no summary", "exit 75", "crash once", "diverge", "not a number"]


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory):
    """A sweep whose estimators, except the control, fail in different ways, run twice."""
    project = Project(tmp_path_factory.mktemp("misbehaving"))
    plan = project.write(
        rloo={"behaviour": {name: name for name in MISBEHAVIOURS}},
        grid={"arms": ["MonteCarlo", *MISBEHAVIOURS], "beta": {0: 0.1}, "replicates": 1},
    )
    project.code, project.output = project.run("sweep", "--config", plan)
    project.ran_first = project.ran()
    project.code_again, project.output_again = project.run("sweep", "--config", plan)
    return project


def attempts(project, estimator, ran):
    plan = json.loads((project.directory / "plan" / "plan.json").read_text())
    (cell,) = (cell for cell in plan["cells"] if cell["arm"] == estimator)
    return ran.count(cell["id"])


def test_failing_cells_do_not_stop_the_others_and_are_listed(misbehaving):
    assert misbehaving.code == 1
    assert "10 cells: 4 done, 2 diverged, 4 failed; 6 run now" in misbehaving.output
    for name in ("crash", "usage", "no summary", "exit 75"):
        assert f"failed: rloo {name} beta=0.1 #0; its log: " in misbehaving.output
    assert misbehaving.output.count("RuntimeError: out of luck") == 1
    assert misbehaving.output.count("the run ended without summary.json") == 1
    assert "rloo exit 75 beta=0.1 #0: exit code 1; given up" in misbehaving.output
    records = [json.loads(path.read_text()) for path in (misbehaving.directory / "plan" / "failed").iterdir()]
    (crash,) = (record for record in records if record["cell"]["arm"] == "crash")
    # Three attempts in each of the two sweeps.
    assert crash["attempts"] == 6
    assert crash["error"].startswith("exit code 1\n")
    assert crash["error"].endswith("RuntimeError: out of luck")
    assert len(records) == 4
    assert misbehaving.code_again == 1
    assert "10 cells: 4 done, 2 diverged, 4 failed; no cell was run" in misbehaving.output_again


@pytest.mark.parametrize(
    ("name", "expected"), [("crash", 3), ("no summary", 3), ("crash once", 2), ("usage", 1), ("diverge", 1)]
)
def test_only_failures_that_may_be_transient_are_repeated(misbehaving, name, expected):
    assert attempts(misbehaving, name, misbehaving.ran_first) == expected


def test_a_divergence_is_a_result_whatever_exit_code_or_summary(misbehaving):
    for name in ("diverge", "not a number"):
        assert f"rloo {name} beta=0.1 #0: diverged" in misbehaving.output
        assert attempts(misbehaving, name, misbehaving.ran()) == 1


def test_the_record_of_a_failure_is_removed_when_the_cell_succeeds(project):
    plan = project.write(grid={"beta": {0: 0.1}, "replicates": 1})
    code, output = project.run("sweep", "--config", plan, FAKE_JOB="crash")
    assert code == 1
    # Cells that start from a failed cell are blocked.
    assert "4 cells: 1 failed, 3 blocked; no cell was run" in output
    assert "blocked: rloo RaoBlackwell beta=0.1 #0" in output
    failed = project.directory / "plan" / "failed"
    assert len([*failed.iterdir()]) == 1
    assert project.run("sweep", "--config", plan)[0] == 0
    assert not [*failed.iterdir()]
