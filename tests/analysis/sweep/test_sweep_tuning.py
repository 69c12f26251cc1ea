"""The tuning stage: it runs first, its choice is locked, and the grid uses it."""

import json
import shutil

import pytest
import yaml
from sweep_project import Project, kill_session, wait_until

from analysis.checks import load_sweep
from analysis.design import expand, read_plan
from analysis.design.rates import choice_of
from lit_klrb.errors import ConfigurationError

TUNING = {"rates": [0.1, 0.2, 0.4], "replicates": 2, "key": "lr"}
CELLS = 2 * 3 * 2 * 2  # arms, rates, betas, replicates


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A tuned sweep, which tests may copy."""
    tuned = Project(tmp_path_factory.mktemp("tuned"))
    path = tuned.write(tuning=TUNING)
    tuned.code, tuned.output = tuned.run("sweep", "--config", path, "--workers", "2")
    return tuned


def rates_of(project, name="plan"):
    """Arm -> the rates with which its runs of the grid were started."""
    found = {}
    for log in (project.directory / name / "cells").glob("*/log.txt"):
        line = log.read_text().partition("\n")[0].split()
        options = dict(zip(line[5::2], line[6::2], strict=True))
        cell = json.loads((project.directory / name / "results" / f"{log.parent.name}.json").read_bytes())
        if cell["cell"]["beta"] is not None:
            found.setdefault(cell["cell"]["arm"], set()).add(float(options["--lr"]))
    return found


def test_the_grid_runs_at_the_rates_that_the_tuning_stage_chose(tuned):
    assert tuned.code == 0, tuned.output
    assert f"{2 + CELLS + 8} cells: {2 + CELLS + 8} done" in tuned.output
    path = tuned.directory / "plan.yaml"
    sweep = load_sweep(tuned.directory / "plan")
    assert len(sweep.trials) == CELLS
    assert sweep.locked.recomputed
    assert not sweep.locked.changed_after_results
    assert not sweep.invalid
    assert sweep.locked.rates == choice_of(sweep.plan, sweep.runs).rates
    assert rates_of(tuned) == {arm: {rate} for arm, rate in sweep.locked.rates.items()}
    printed = tuned.run("plan", "--config", path)[1]
    for arm, rate in sweep.locked.rates.items():
        beyond = {0.1: "0.05 and 0.025", 0.4: "0.8 and 1.6"}.get(rate)
        assert (f"{arm} is at the " in printed) == (beyond is not None)
        assert beyond is None or f"the next two rates to try are {beyond}" in printed
    seeds = {run.cell.seed for run in sweep.trials}
    assert len(seeds) == 4
    assert not seeds & {run.cell.seed for run in sweep.grid.values()}
    order = tuned.ran()
    trials = {run.cell.id for run in sweep.trials}
    assert set(order[2 : 2 + CELLS]) == trials
    before = (tuned.directory / "plan" / "plan.json").read_bytes()
    code, output = tuned.run("sweep", "--config", path)
    assert code == 0
    assert "no cell was run" in output
    assert (tuned.directory / "plan" / "plan.json").read_bytes() == before


def test_a_killed_sweep_continues_to_the_same_results(project, tuned):
    cut = project.write("cut", tuning=TUNING)
    for done in (3, CELLS + 1, CELLS + 4):
        process = project.start("sweep", "--config", cut, "--workers", "1")
        results = project.directory / "cut" / "results"
        wait_until(lambda results=results, done=done: len(list(results.glob("*.json"))) >= done)
        kill_session(process)
    assert project.run("sweep", "--config", cut)[0] == 0
    one, other = (path / "plan.json" for path in (tuned.directory / "plan", project.directory / "cut"))
    assert json.loads(one.read_bytes())["choice"] == json.loads(other.read_bytes())["choice"]
    assert project.results("cut") == tuned.results()


def test_the_plan_prints_the_cells_of_tuning_and_their_time(project):
    code, output = project.run("plan", "--cells", "--config", project.write(tuning=TUNING))
    assert code == 0, output
    assert f"tuning\t{CELLS}\t60 s (assumed" in output
    assert "tuning MonteCarlo rate=0.1 beta=0.1 #0" in output
    assert "3 rates from 0.1 to 0.4 of lr" in output


def test_without_a_result_of_every_trial_the_grid_is_blocked(project):
    path = project.write(tuning=TUNING, rloo={"seconds": 0, "behaviour": {"RaoBlackwell": "crash"}})
    code, output = project.run("sweep", "--config", path, "--workers", "2")
    assert code == 1
    assert "8 blocked" in output
    assert "a cell of the tuning stage has no result" in output


def test_a_choice_that_is_not_that_of_the_results_gives_no_verdict(tmp_path, tuned):
    path = shutil.copytree(tuned.directory / "plan", tmp_path / "plan") / "plan.json"
    document = json.loads(path.read_bytes())
    for choice in ({**document["choice"], "rates": {"MonteCarlo": 9.0, "RaoBlackwell": 9.0}}, None):
        path.write_text(json.dumps({**document, "choice": choice}))
        (problem, *_) = load_sweep(path.parent).invalid
        assert "choice of rates" in problem


def test_the_ids_of_the_grid_depend_on_the_rates_tried_and_not_on_their_order(project):
    def ids(**tuning):
        plan = read_plan(project.write(tuning=TUNING | tuning))
        return {cell.id for cell in expand(plan).cells if cell.point}

    assert ids() == ids(rates=[0.1, 0.2, 0.4])
    assert not ids() & ids(rates=[0.1, 0.2, 0.8])
    plain = read_plan(project.write())
    assert "tuning" not in plain.record()
    assert not {cell.id for cell in expand(plain).cells if cell.point} & ids()


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"rates": [0.1, 0.2]}, "tuning.rates: [0.1, 0.2] is not allowed; List should have at least 3"),
        ({"rates": [0.1, 0.1, 0.2]}, "tuning.rates"),
        ({"replicates": 1}, "tuning.replicates: 1 is not allowed"),
        ({"key": "kl.beta"}, "tuning.key: 'kl.beta' is not allowed"),
        ({"key": "kl.estimator"}, "tuning chooses it"),
    ],
)
def test_what_cannot_be_tuned_is_refused(project, tuning, message):
    with pytest.raises(ConfigurationError) as caught:
        read_plan(project.write(tuning=TUNING | tuning))
    assert message in str(caught.value)
    assert yaml.safe_load((project.directory / "plan.yaml").read_text())["tuning"]
