"""Runs that contradict each other, though each file is intact."""

import json
import re
from dataclasses import replace

import pytest
from synthetic import ESTIMATORS, edit_plan, grid_results, publish, settle, write_sweep

from analysis.checks import load_sweep
from analysis.checks.settings import ignored_overrides
from analysis.report.assessment import load_assessment
from analysis.results import Stage

DESIGN = {"replicates": 3, "betas": {0: 0.1, 1: 0.3}}


def with_settings(point, made):
    settings = {"kl.beta": made["cell"]["beta"], "kl.estimator.class_path": point[0], "model.temperature": 1}
    return {**made, "settings": settings}


@pytest.fixture
def runs(tmp_path):
    write_sweep(tmp_path, edit=with_settings, **DESIGN)
    assert load_sweep(tmp_path).problems == []
    return tmp_path


def change(runs, edit, arm="RaoBlackwell"):
    """Publish the results of an arm anew, with a valid checksum."""
    for made in grid_results(runs, arm).values():
        edit(made)
        publish(runs / "results", settle(made))


def told(runs):
    """The text of each problem, without its file, and whether it rules out a verdict."""
    problems = load_sweep(runs).problems
    return [
        (re.sub(r"results/[0-9a-f]*", "x", one.text).removeprefix("x.json: "), one.serious)
        for one in problems
    ]


def test_other_numbers_of_optimizer_steps_of_the_same_rollouts_are_a_caution(runs):
    def four_steps_per_rollout(made):
        made["curves"] = {
            key: {**one, "step": [4 * step + 3 for step in one["step"]]} if key[:6] == "train/" else one
            for key, one in made["curves"].items()
        }
        made["settings"]["model.inner_epochs"] = 4

    change(runs, four_steps_per_rollout)
    assert ("the runs end at different steps: MonteCarlo 19; RaoBlackwell 79", False) in told(runs)


@pytest.mark.parametrize(
    ("planned", "recorded", "problem"),
    [
        ({"model.init_args.learning_rate": 1e-4}, {"model.learning_rate": "0.0001"}, ""),
        ({"model.learning_rate": 1e-4}, {"model.learning_rate": "0.001"}, "model.learning_rate = 0.001"),
        ({"model.learning_rate": 1e-4}, {}, "model.learning_rate = none, expected 0.0001"),
        (
            {"kl.estimator": {"class_path": "K3", "init_args": {"discount": 0.5}}},
            {"kl.estimator.class_path": "lit.K3", "kl.estimator.discount": "0.9"},
            "discount = 0.9, expected 0.5",
        ),
        ({"model.stop": True, "trainer.callbacks": [1], "data.source": "/tmp/x"}, {"model.stop": "True"}, ""),
        ({"data.source": "a/x.jsonl"}, {"data.source": "b/x.jsonl"}, "data.source = b/x.jsonl, expected"),
    ],
)
def test_settings_that_are_not_the_overrides_give_no_verdict(runs, planned, recorded, problem):
    sweep = load_sweep(runs)
    run = next(iter(sweep.grid.values()))
    run = replace(
        run, cell=replace(run.cell, overrides=planned), settings={"kl.beta": str(run.point.beta), **recorded}
    )
    found = list(ignored_overrides([run], sweep.plan, {}))
    assert [one.serious for one in found] == [True] * bool(problem)
    assert not problem or problem in found[0].text


def test_an_override_of_the_stage_that_was_ignored_gives_no_verdict(runs):
    sweep = load_sweep(runs)
    *_, last = sweep.plan.stages
    plan = replace(sweep.plan, stages={**sweep.plan.stages, last: Stage("", {}, {"trainer.max_steps": 5})})
    (*_, found) = ignored_overrides(list(sweep.grid.values()), plan, {})
    assert "trainer.max_steps = none, expected 5" in found.text


def test_arms_that_were_evaluated_differently_give_no_verdict(runs):
    def edit(document):
        estimator = {"module": "m", "estimator": None, "optimises": None, "biased": False}
        document["content"]["arms"] = {
            name: {**estimator, "evaluation": {"seed": [1, 0]} if name == "RaoBlackwell" else {}}
            for name in ESTIMATORS
        }

    edit_plan(runs, edit)
    assert told(runs) == [("RaoBlackwell was evaluated with seed = 1, MonteCarlo with 0", True)]
    assert load_assessment(runs).withheld


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("beta", 0.2, "its beta is 0.2, expected 0.1"),
        ("overrides", {"kl.estimator": "K3Loss"}, "its overrides are {'kl.estimator': 'K3Loss'}, expected"),
        ("needs", ["0" * 64], "it does not start from sft and dpo"),
    ],
)
def test_a_cell_that_its_plan_does_not_give_gives_no_verdict(runs, key, value, problem):
    cells = json.loads((runs / "plan.json").read_bytes())["cells"]
    index = next(i for i, cell in enumerate(cells) if cell["arm"] == "MonteCarlo")
    edit_plan(runs, lambda document: document["cells"][index].update({key: value}))
    beta = value if key == "beta" else cells[index]["beta"]
    first = load_sweep(runs).invalid[0]
    assert first.startswith(f"plan.json: rloo MonteCarlo beta={beta} #0: {problem}")


def test_the_first_rollout_which_all_arms_of_a_seed_share_is_no_copy(runs):
    """In a run of two rollouts with two steps each it is half of the values."""

    def shorten(made):
        values = made["curves"]["train/kl"]["value"]
        made["curves"]["train/kl"] = {"step": [0, 1, 2, 3], "value": [0.047551, 0.047551, *values[:2]]}

    for arm in ESTIMATORS:
        change(runs, shorten, arm)
    assert not any("a copy" in text for text, _ in told(runs))
    first = next(iter(grid_results(runs, "MonteCarlo").values()))["curves"]["train/kl"]
    for made in list(grid_results(runs, "RaoBlackwell").values())[:1]:
        made["curves"]["train/kl"] = first
        publish(runs / "results", settle(made))
    assert any("2 of 4 values of its KL are those of" in text for text, _ in told(runs))
