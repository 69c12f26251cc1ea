"""Files changed so that an arm looks better: no verdict, or a line on the page."""

import json
import shutil

import pytest
from attacks import (
    ARM,
    CONTROL,
    GONE,
    change,
    copied,
    deleted,
    digit,
    ended,
    factor,
    logged,
    lost,
    other_seeds,
    penalised,
    planned,
    prompts,
    put,
    renumbered,
    reseeded,
    shifted,
)
from synthetic import publish, write_sweep

from analysis.report.assessment import load_assessment
from analysis.report.sections.summary import summary
from analysis.report.sections.tradeoff import tradeoff
from analysis.stats import Outcome

SETTINGS = {
    "model.class_path": "RLOOModule",
    "model.reward_path": "grammar",
    "model.stop_at_eos": True,
    "model.temperature": 1.0,
    "data.eval_size": 256,
    "trainer.precision": "32-true",
    "trainer.gradient_clip_val": 1.0,
}
CONFIG = {"model": {"class_path": "RLOOModule", "init_args": {"temperature": 1.0}}, "kl": {"beta": 9.0}}
ROWS = {"train": "ab" * 32, "validation": "cd" * 32}
TRAINED, EVALUATED = (("curves train/reward", "curves train/kl"), ("curves val/reward", "curves val/kl"))


def recorded(point, made):
    """A result with its settings and the hashes of its rows."""
    beta, estimator = made["cell"]["beta"], f"lit_klrb.estimators.{point[0]}"
    settings = {**SETTINGS, "kl.beta": beta, "kl.estimator.class_path": estimator}
    return {**made, "settings": settings, "rows_sha256": dict(ROWS), "processes": 1, "rows_per_step": 8}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A sweep whose verdict is "better" and which has no problem."""
    runs = tmp_path_factory.mktemp("attacks")
    lift = {ARM: 0.6}
    return write_sweep(runs, replicates=5, betas={0: 0.1, 1: 0.3}, lift=lift, edit=recorded, config=CONFIG)


@pytest.fixture
def runs(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "runs")


OTHER, SAME = "ef" * 32, {"weights_sha256": "ab" * 32}
FAR = {"final reward": lambda value: value + 1.5}
LONGER = {f"{TRAINED[0]} {key}": lambda values: [*values, 99] for key in ("step", "value")}
DIFFER = "the runs differ in settings that the plan does not change: "
START = "before the first step differs between arms"
NO_START = "runs without an evaluation before the first step, which every run has, unless "
# Arm or run, what is changed, whether curves follow the result, and the line of the page
CHANGES = {
    "another reward in one arm": (
        ARM,
        {"settings model.reward_path": "mine:reward"},
        False,
        f"{DIFFER}model.r",
    ),
    "another end in one arm": (
        ARM,
        {"settings model.stop_at_eos": False},
        False,
        f"{DIFFER}model.stop_at_eos",
    ),
    "fewer prompts in one arm": (ARM, {"settings data.eval_size": 32}, False, f"{DIFFER}data.eval_size"),
    "a setting in one run": ((ARM, 0, 0), {"settings model.top_p": 1}, False, f"{DIFFER}model.top_p"),
    "no settings in one arm": (ARM, {"settings": GONE}, False, f"{DIFFER}data.eval_size"),
    "no clip in one arm": (
        *(ARM, {"settings trainer.gradient_clip_val": GONE}, False),
        f"{DIFFER}trainer.gradient_clip_val (MonteCarlo 1; RaoBlackwell none)",
    ),
    "one arm in two processes": (
        *(ARM, {"processes": 2}, False),
        f"{DIFFER}trainer.devices (MonteCarlo 1; RaoBlackwell 2)",
    ),
    "all at another temperature than planned": (
        *(None, {"settings model.temperature": 0.5}, False),
        "its settings have model.temperature = 0.5, expected 1.0",
    ),
    "other prompts of the same number": (
        *(ARM, {"rows_sha256 validation": OTHER}, False),
        "were evaluated on other rows: MonteCarlo cdcdcdcdcdcd; RaoBlackwell efefefefefef",
    ),
    "other training data of the same size": (
        *(ARM, {"rows_sha256 train": OTHER}, False),
        "were trained on other rows",
    ),
    "other prompts without their hash": (
        *(ARM, lambda made: (logged("reward", lambda value, _: value + 0.02)(made), made.pop("rows_sha256"))),
        *(False, f"the reward {START}"),
    ),
    # Which a large standard error of the start would explain, if any record could show that it is right
    "other prompts, and large errors": (
        ARM,
        lambda made: (
            logged("reward", lambda value, _: value + 0.02)(made),
            made["curves"].update({"val/reward_se": {"step": [0], "value": [9.0]}}),
        ),
        *(False, f"the reward {START}"),
    ),
    "one model for all seeds": (ARM, SAME, False, "10 runs of 10 seeds have the same weights"),
    "null rewards of the control": (
        CONTROL,
        {"final reward": lambda _: None},
        False,
        "has no reward or no KL, though",
    ),
    "no reward of the control": (
        *(CONTROL, {"final reward": GONE}, False),
        "its last evaluation has both: it did not diverge",
    ),
    "the result raised": (ARM, {"final reward": 9.0}, False, "its reward is 9, but"),
    "a negative KL": (ARM, {"final kl": -1.0}, True, "its KL is -1; a KL is not negative"),
    "rewards times three": (ARM, logged("reward", lambda value, _: 3 * value), False, f"the reward {START}"),
    "the sign of rewards": (CONTROL, logged("reward", lambda value, _: -value), False, f"the reward {START}"),
    "penalised rewards": (CONTROL, logged("reward", penalised), False, f"the reward {START}"),
    "KL(reference || policy)": (ARM, logged("kl", lambda value, _: 0.9 * value), False, f"the kl {START}"),
    "KL per token in one arm": (ARM, logged("kl", lambda value, _: value / 20), False, f"the kl {START}"),
    "more steps in one arm": (ARM, LONGER, False, "the runs end at different steps"),
    "one reward in all runs of the control": (
        *(CONTROL, {"final reward": 0.4}, True),
        "all 10 runs of MonteCarlo have the same reward, 0.4",
    ),
    "one KL in all runs of one arm": (
        *(ARM, {"final kl": 0.4}, True),
        "all 10 runs of RaoBlackwell have the same KL, 0.4",
    ),
    "no training in one arm": (
        *(ARM, dict.fromkeys(TRAINED), False),
        "runs without curves of training, which others have: 10 of RaoBlackwell",
    ),
    "no evaluations in one arm": (ARM, dict.fromkeys(EVALUATED), False, NO_START),
    "no evaluations in any arm": (None, dict.fromkeys(EVALUATED), False, NO_START),
    "the last evaluation alone": (
        *(None, {f"{EVALUATED[0]} {key}": lambda values: values[-1:] for key in ("step", "value")}, False),
        NO_START,
    ),
    "no versions in one arm": (
        *(ARM, {"versions": {}}, False),
        "runs without versions, which others have: 10 of RaoBlackwell",
    ),
    "no weights in one arm": (
        *(CONTROL, lambda made: made.update(weights_sha256=made["id"]), False),
        "runs without the hash of their weights, which others have: 10 of RaoBlackwell",
    ),
    "nothing to check": (
        *(None, {"settings": GONE, "rows_sha256": GONE, "curves": {}}, False),
        "nothing can be checked",
    ),
    "an evaluation far from the rollouts": (
        *(ARM, FAR, True),
        "the reward of RaoBlackwell rises in its evaluations by 1.",
    ),
    "other versions in one arm": (
        *(ARM, {"versions torch": "1.0"}, False),
        "all runs of RaoBlackwell were made with other versions than those of the control",
    ),
}
WITHHELD = {
    name: (change(which, edit, settled=s), line) for name, (which, edit, s, line) in CHANGES.items()
} | {
    "a temperature of one arm in the plan": (
        planned,
        "the arms were evaluated with other values of model.temperature",
    ),
    "a run copied with a digit moved": (
        copied((ARM, 0, 0), (ARM, 0, 3), digit),
        "18 of 20 values of its KL are those of",
    ),
    "a run copied to another beta": (copied((ARM, 0, 0), (ARM, 1, 3)), "at another seed: a copy"),
    "a copy with a factor": (copied((ARM, 0, 0), (ARM, 0, 3), factor), ", times "),
    "starts renumbered": (renumbered, "its id is not that of its configuration, seed and inputs"),
    "seeds of one arm": (reseeded, "have different seeds"),
    "seeds of all runs": (lambda runs: other_seeds(runs, CONFIG), "0: its seed is "),
    "half of the prompts": (prompts(kept=8), "different numbers of prompts: MonteCarlo 16; RaoBlackwell 8"),
    "half of the prompts of all": (prompts(evaluated=32), "has values of 16 prompts, but 32 were evaluated"),
    "no values of prompts": (
        prompts(changes={"prompts": GONE}),
        "has values of 0 prompts, but 16 were evaluated",
    ),
    "errors that the prompts do not give": (prompts(error=0.5), "the standard error of its reward is 0.0"),
    "equal weights with other results": (
        change((ARM, 0, 0), SAME, then=change((CONTROL, 0, 0), SAME)),
        "2 runs with different results have the same weights",
    ),
    "equal differences in all pairs": (
        shifted,
        "the reward of RaoBlackwell less that of MonteCarlo is 0.6 in all 5 pairs at β = 0.1",
    ),
    "another processor in one arm": (
        change(ARM, {"versions processor": "a"}, then=change(CONTROL, {"versions processor": "b"})),
        "all runs of RaoBlackwell were made on another kind of processor than those of the control",
    ),
}
# A line beside the verdict, or in place of one for a reason that is not in the files.
BESIDE = {
    "other versions in a run": (
        change((ARM, 0, 0), {"versions torch": "1.0"}),
        "the runs were made with different versions",
    ),
    "other processors of single runs": (
        change(
            None, {"versions processor": "one"}, then=change((ARM, 0, 0), {"versions processor": "other"})
        ),
        "1 of 10 groups of matched runs were trained on several kinds of processors (one, other)",
    ),
    "one run as both of its pair": (
        copied((CONTROL, 0, 0), (ARM, 0, 0), {"settings kl.estimator.class_path": ARM}),
        "at one seed: a copy, or arms that do the same",
    ),
    "the best runs of the control as failures": (lost, "runs without a result: MonteCarlo 3, RaoBlackwell 0"),
    "what the verdict would be without failures": (
        lost,
        "If 3 lost runs had been as the best of their β for MonteCarlo",
    ),
    "evaluations of the control removed": (change(CONTROL, ended), "Some runs diverged. They rank last"),
    "the best runs of the control deleted": (deleted, "3 of 20 planned runs have no result yet"),
}


def test_without_an_attack_the_verdict_is_better(honest):
    assessment = load_assessment(honest)
    assert assessment.sweep.problems == []
    assert [one.primary.outcome for one in assessment.comparisons] == [Outcome.BETTER]


@pytest.mark.parametrize("name", WITHHELD)
def test_an_attack_withholds_the_verdict(name, runs):
    attack, line = WITHHELD[name]
    attack(runs)
    assessment = load_assessment(runs)
    assert any(line in text for text in assessment.sweep.invalid), assessment.sweep.invalid
    assert assessment.withheld


@pytest.mark.parametrize("name", BESIDE)
def test_an_attack_that_may_be_honest_has_a_line(name, runs, undrawn):
    attack, line = BESIDE[name]
    attack(runs)
    assert line in " ".join(summary(load_assessment(runs)).paragraphs)


def test_an_error_that_no_prompts_show_is_not_used(runs):
    """Nothing in such files can show that it is wrong: it decides nothing, and the page has a dash."""
    before = load_assessment(runs)
    change(ARM, {"final reward_se": 1e-9, "final kl_se": 1e-9})(runs)
    after = load_assessment(runs)
    assert [one.primary for one in after.comparisons] == [one.primary for one in before.comparisons]
    (figure,) = tradeoff(after).figures
    assert {(row[4], row[6]) for row in figure.table.cells} == {("–", "–")}
    prompts()(runs)
    (figure,) = tradeoff(load_assessment(runs)).figures
    assert not {row[6] for row in figure.table.cells} & {"–", "0.00"}
    assert load_assessment(runs).sweep.problems == []


def test_a_plan_may_leave_out_the_evaluation_before_the_first_step(tmp_path):
    config = {"trainer": {"num_sanity_val_steps": 0}}
    write_sweep(tmp_path, config=config, edit=lambda _, made: put(made, dict.fromkeys(EVALUATED)) or made)
    assert load_assessment(tmp_path).sweep.invalid == []


@pytest.mark.parametrize("weights", ["", "ab" * 32])
def test_starts_of_one_hash_are_no_blocks(weights, tmp_path):
    write_sweep(tmp_path, replicates=8, blocks=4, lift={ARM: 0.6})
    for path in (tmp_path / "results").glob("*.json"):
        made = json.loads(path.read_bytes())
        if weights and made["cell"]["stage"] in ("dpo-1", "dpo-3"):
            publish(path.parent, {**made, "weights_sha256": weights})
    assessment = load_assessment(tmp_path)
    lines = ["the blocks dpo-1, dpo-3 start from the same weights: they are one"] * bool(weights)
    assert assessment.sweep.invalid == lines
    assert bool(assessment.withheld) is bool(weights)


def test_lost_runs_of_the_control_are_taken_as_its_best(tmp_path):
    """As its worst they would make a small gain of the other arm a better one."""
    write_sweep(tmp_path, replicates=8, betas={0: 0.1, 1: 0.3}, lift={ARM: 0.1})
    lost(tmp_path)
    assert load_assessment(tmp_path).worst.endswith(f"{ARM} against {CONTROL} inconclusive.")
