"""Files changed so that an arm looks better: no verdict, or a line on the page."""

import json
import shutil

import numpy as np
import pytest
import yaml
from synthetic import edit_plan, fail, grid_results, publish, settle, write_sweep

from analysis.imports.imported import import_runs
from analysis.report.assessment import load_assessment
from analysis.report.sections.summary import summary
from analysis.stats import Outcome

ARM, CONTROL = "RaoBlackwell", "MonteCarlo"
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


def change(arm, edit, *, settled=False):
    """An attack that publishes every run of an arm anew, with a valid checksum."""

    def attack(runs):
        for made in grid_results(runs, arm).values():
            edit(made)
            publish(runs / "results", settle(made) if settled else made)

    return attack


def setting_of(key, value):
    return lambda made: made["settings"].update({key: value})


def setting(key, value, arm=ARM):
    return change(arm, setting_of(key, value))


def logged(key, of):
    """An edit of a metric in the result and in all curves, where `of` maps the value and beta."""

    def edit(made):
        beta = made["cell"]["beta"]
        made["final"][key] = of(made["final"][key], beta)
        for source in ("train", "val"):
            curve = made["curves"][f"{source}/{key}"]
            curve["value"] = [of(value, beta) for value in curve["value"]]

    return edit


def copied(source, target, edit=lambda made: None):
    """An attack that publishes a run as that of another cell."""

    def attack(runs):
        found = grid_results(runs)
        made = {**found[source], **{key: found[target][key] for key in ("id", "cell")}}
        made["settings"] |= {"kl.beta": found[target]["cell"]["beta"]}
        edit(made)
        publish(runs / "results", made)

    return attack


def digit(made):
    made["final"]["kl"] += 0.001
    made["curves"]["train/kl"]["value"][3] += 0.001
    settle(made)


def void(made, *, state="done", curves=()):
    made["state"] = state
    made["final"] = {"reward": None, "kl": made["final"]["kl"]}
    for key in curves:
        made["curves"][key]["value"][-1] = None


def planned(key, value):
    """An attack whose plan says that an arm is evaluated otherwise."""

    def attack(runs):
        def edit(document):
            for plan in (document["content"]["plan"], document["history"][0]["plan"]):
                plan["grid"]["arms"][ARM][key] = value
            for cell in document["cells"]:
                if cell["arm"] == ARM:
                    cell["overrides"][key] = value

        edit_plan(runs, edit)
        change(ARM, lambda made: made["cell"]["overrides"].update({key: value}))(runs)
        setting(key, value)(runs)

    return attack


def lost(runs):
    """The best runs of the control become failures."""
    found = grid_results(runs, CONTROL)
    for place in sorted(found, key=lambda place: -found[place]["final"]["reward"])[:3]:
        fail(runs, place)
        (runs / "results" / f"{found[place]['id']}.json").unlink()


def seeds(document):
    for cell in document["cells"]:
        cell["seed"] += cell["arm"] == ARM


def renumbered(runs):
    """The first two replicates of an arm exchange their numbers and seeds, in the plan and in the results."""
    found = grid_results(runs, ARM)
    of = {
        made["id"]: found[ARM, index, 1 - place]["cell"]
        for (_, index, place), made in found.items()
        if place < 2
    }

    def edit(document):
        for cell in document["cells"]:
            cell |= {key: of[cell["id"]][key] for key in ("replicate", "seed")} if cell["id"] in of else {}

    edit_plan(runs, edit)
    for made in found.values():
        if made["id"] in of:
            publish(runs / "results", {**made, "cell": of[made["id"]]})


def prompts(kept=16, error=1.0):
    """An attack that keeps the best prompts of an arm, or multiplies its standard errors."""

    def attack(runs):
        for (arm, *_), made in grid_results(runs).items():
            for key in ("reward", "kl"):
                own = made["final"][key] + np.linspace(-0.5, 0.5, 16)[-kept if arm == ARM else 0 :]
                told = own.std(ddof=1) / len(own) ** 0.5 * (error if arm == ARM else 1)
                made["final"] |= {key: float(own.mean()), f"{key}_se": float(told)}
                made.setdefault("prompts", {})[key] = own.tolist()
            publish(runs / "results", settle({**made, "evaluation_prompts": 16}))

    return attack


def shifted(runs):
    """All runs of an arm are those of the control with a larger reward, rounded."""
    found = grid_results(runs)
    for (arm, *place), made in found.items():
        if arm == ARM:
            made["final"]["reward"] = round(found[CONTROL, *place]["final"]["reward"] + 0.6, 4)
            publish(runs / "results", settle(made))


def bare(runs):
    """Nothing but results is left."""
    for made in grid_results(runs).values():
        kept = {key: value for key, value in made.items() if key not in ("settings", "rows_sha256")}
        publish(runs / "results", {**kept, "curves": {}})


def factor(made):
    """Every digit of a copy times 1 + 1e-4."""
    for values in (curve["value"] for curve in made["curves"].values()):
        values[1:] = [value * (1 + 1e-4) for value in values[1:]]
    made["final"] = {key: value * (1 + 1e-4) for key, value in made["final"].items()}


def processors(runs):
    for arm in (CONTROL, ARM):
        change(arm, lambda made, arm=arm: made["versions"].update(processor=arm))(runs)


DIFFER = "the runs differ in settings that the plan does not change: "
START = "before the first step differs between arms"
OTHERS = {"model.reward_path": "mine:reward", "model.stop_at_eos": False, "data.eval_size": 32}
WITHHELD = {
    **{f"{key} in one arm": (setting(key, value), f"{DIFFER}{key}") for key, value in OTHERS.items()},
    "a setting in one run": (
        copied((ARM, 0, 0), (ARM, 0, 0), setting_of("model.top_p", 1)),
        f"{DIFFER}model.top_p",
    ),
    "no settings in one arm": (change(ARM, lambda made: made.pop("settings")), f"{DIFFER}data.eval_size"),
    "no clip in one arm": (
        change(ARM, lambda made: made["settings"].pop("trainer.gradient_clip_val")),
        f"{DIFFER}trainer.gradient_clip_val (MonteCarlo 1; RaoBlackwell none)",
    ),
    "one arm in two processes": (
        change(ARM, lambda made: made.update(processes=2)),
        f"{DIFFER}trainer.devices (MonteCarlo 1; RaoBlackwell 2)",
    ),
    "all at another temperature than planned": (
        setting("model.temperature", 0.5, arm=None),
        "its settings have model.temperature = 0.5, expected 1.0",
    ),
    "a temperature of one arm in the plan": (
        planned("model.temperature", 0.7),
        "the arms were evaluated with other values of model.temperature",
    ),
    "other prompts of the same number": (
        change(ARM, lambda made: made["rows_sha256"].update(validation="ef" * 32)),
        "were evaluated on other rows: MonteCarlo cdcdcdcdcdcd; RaoBlackwell efefefefefef",
    ),
    "other training data of the same size": (
        change(ARM, lambda made: made["rows_sha256"].update(train="ef" * 32)),
        "were trained on other rows",
    ),
    "other prompts without their hash": (
        change(
            ARM, lambda made: (logged("reward", lambda value, _: value + 0.02)(made), made.pop("rows_sha256"))
        ),
        "the reward before the first step differs",
    ),
    "a run copied with a digit moved": (
        copied((ARM, 0, 0), (ARM, 0, 3), digit),
        "18 of 20 values of its KL are those of",
    ),
    "a run copied to another beta": (copied((ARM, 0, 0), (ARM, 1, 3)), "at another seed: a copy"),
    "one model for all seeds": (
        change(ARM, lambda made: made.update(weights_sha256="ab" * 32)),
        "10 runs of 10 seeds have the same weights",
    ),
    "null rewards of the control": (change(CONTROL, void), "has no reward or no KL, though"),
    "no reward of the control": (
        change(CONTROL, lambda made: made["final"].pop("reward")),
        "its last evaluation has both: it did not diverge",
    ),
    "the result raised": (change(ARM, lambda made: made["final"].update(reward=9.0)), "its reward is 9, but"),
    "a negative KL": (
        change(ARM, lambda made: made["final"].update(kl=-1.0), settled=True),
        "its KL is -1; a KL is not negative",
    ),
    "rewards times three": (change(ARM, logged("reward", lambda value, _: 3 * value)), f"the reward {START}"),
    "the sign of the control's rewards": (
        change(CONTROL, logged("reward", lambda value, _: -value)),
        f"the reward {START}",
    ),
    "rewards of the control that are penalised": (
        change(CONTROL, logged("reward", lambda value, beta: value - beta * 0.4)),
        f"the reward {START}",
    ),
    "KL(reference || policy) in one arm": (
        change(ARM, logged("kl", lambda value, _: 0.9 * value)),
        f"the kl {START}",
    ),
    "KL per token in one arm": (change(ARM, logged("kl", lambda value, _: value / 20)), f"the kl {START}"),
    "more steps in one arm": (
        change(ARM, lambda made: [of.append(99) for of in made["curves"]["train/reward"].values()]),
        "the runs end at different steps",
    ),
    "starts renumbered": (renumbered, "its id is not that of its configuration, seed and inputs"),
    "half of the prompts kept": (
        prompts(kept=8),
        "different numbers of prompts: MonteCarlo 16; RaoBlackwell 8",
    ),
    "half of the prompts of all arms kept": (
        lambda runs: (prompts()(runs), change(None, lambda made: made.update(evaluation_prompts=32))(runs)),
        "has values of 16 prompts, but 32 were evaluated",
    ),
    "errors that the prompts do not give": (
        prompts(error=0.5),
        "the standard error of its reward is 0.0",
    ),
    "equal weights with other results": (
        lambda runs: [
            copied((arm, 0, 0), (arm, 0, 0), lambda made: made.update(weights_sha256="ab" * 32))(runs)
            for arm in (CONTROL, ARM)
        ],
        "2 runs with different results have the same weights",
    ),
    "a copy with a factor": (copied((ARM, 0, 0), (ARM, 0, 3), factor), ", times "),
    "equal differences in all pairs": (
        shifted,
        "the reward of RaoBlackwell less that of MonteCarlo is 0.6 in all 5 pairs at β = 0.1",
    ),
    "one reward in all runs of the control": (
        change(CONTROL, lambda made: made["final"].update(reward=0.4), settled=True),
        "all 10 runs of MonteCarlo have the same reward, 0.4",
    ),
    "one KL in all runs of one arm": (
        change(ARM, lambda made: made["final"].update(kl=0.4), settled=True),
        "all 10 runs of RaoBlackwell have the same KL, 0.4",
    ),
    "no training in one arm": (
        change(ARM, lambda made: [made["curves"].pop(f"train/{key}") for key in ("reward", "kl")]),
        "runs without curves of training, which others have: 10 of RaoBlackwell",
    ),
    "no evaluations before the last in one arm": (
        change(ARM, lambda made: [made["curves"].pop(key) for key in [*made["curves"]] if key[:4] == "val/"]),
        "runs without evaluations before the last, which others have: 10 of RaoBlackwell",
    ),
    "no versions in one arm": (
        change(ARM, lambda made: made.update(versions={})),
        "runs without versions, which others have: 10 of RaoBlackwell",
    ),
    "no weights in one arm": (
        change(CONTROL, lambda made: made.update(weights_sha256=made["id"])),
        "runs without the hash of their weights, which others have: 10 of RaoBlackwell",
    ),
    "nothing to check": (bare, "nothing can be checked"),
    "an evaluation far from the rollouts": (
        change(ARM, lambda made: made["final"].update(reward=made["final"]["reward"] + 1.5), settled=True),
        "the reward of RaoBlackwell rises in its evaluations by 1.",
    ),
    "other versions in one arm": (
        change(ARM, lambda made: made["versions"].update(torch="1.0")),
        "all runs of RaoBlackwell were made with other versions than those of the control",
    ),
    "another processor in one arm": (
        processors,
        "all runs of RaoBlackwell were made on another kind of processor than those of the control",
    ),
    "seeds of one arm": (
        lambda runs: (
            edit_plan(runs, seeds),
            change(ARM, lambda made: made["cell"].update(seed=made["cell"]["seed"] + 1))(runs),
        ),
        "have different seeds",
    ),
}
# A line beside the verdict, or in place of one for a reason that is not in the files.
TOLD = {
    "other versions in a run": (
        copied((ARM, 0, 0), (ARM, 0, 0), lambda made: made["versions"].update(torch="1.0")),
        "the runs were made with different versions",
    ),
    "other processors of single runs": (
        lambda runs: (
            [
                change(arm, lambda made: made["versions"].update(processor="one"))(runs)
                for arm in (CONTROL, ARM)
            ]
            + [
                copied((ARM, 0, 0), (ARM, 0, 0), lambda made: made["versions"].update(processor="another"))(
                    runs
                )
            ]
        ),
        "1 of 10 groups of matched runs were trained on several kinds of processors (another, one)",
    ),
    "one run as both of its pair": (
        copied((CONTROL, 0, 0), (ARM, 0, 0), setting_of("kl.estimator.class_path", ARM)),
        "at one seed: a copy, or arms that do the same",
    ),
    "the best runs of the control as failures": (lost, "runs without a result: MonteCarlo 3, RaoBlackwell 0"),
    "what the verdict would be without failures": (
        lost,
        "If 3 lost runs had been as the best of their β for MonteCarlo",
    ),
    "evaluations of the control removed": (
        change(CONTROL, lambda made: void(made, state="diverged", curves=["val/reward", "val/kl"])),
        "Some runs diverged. They rank last",
    ),
    "the best runs of the control deleted": (
        lambda runs: [
            (runs / "results" / f"{made['id']}.json").unlink()
            for made in list(grid_results(runs, CONTROL).values())[:3]
        ],
        "3 of 20 planned runs have no result yet",
    ),
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


def test_values_of_all_prompts_are_no_problem(runs):
    prompts()(runs)
    assert load_assessment(runs).sweep.problems == []


@pytest.mark.parametrize("weights", ["", "ab" * 32])
def test_starts_of_one_hash_are_no_blocks(weights, tmp_path):
    write_sweep(tmp_path, replicates=8, blocks=4, lift={ARM: 0.6})
    for path in (tmp_path / "results").glob("*.json"):
        made = json.loads(path.read_bytes())
        if weights and made["cell"]["stage"] in ("dpo-1", "dpo-3"):
            publish(path.parent, {**made, "weights_sha256": weights})
    assessment = load_assessment(tmp_path)
    told = ["the blocks dpo-1, dpo-3 start from the same weights: they are one"] * bool(weights)
    assert assessment.sweep.invalid == told
    assert bool(assessment.withheld) is bool(weights)


@pytest.mark.parametrize("name", TOLD)
def test_an_attack_that_may_be_honest_is_told(name, runs, undrawn):
    attack, line = TOLD[name]
    attack(runs)
    assert line in " ".join(summary(load_assessment(runs)).paragraphs)


STEPS = {name: name for name in ("arm", "beta", "seed", "step", "reward", "kl")} | {"replicate": "seed"}
FINALS = {key: column for key, column in STEPS.items() if key != "step"}
STATED = {"reward_unit": "task", "kl_unit": "sequence"}


def rows():
    """A log of two arms at two betas with seven seeds and six steps, in which rb is better."""
    rng = np.random.default_rng(0)
    return [
        {
            "arm": arm,
            "beta": beta,
            "seed": seed,
            "step": step,
            "reward": 1 + 0.1 * step + 0.3 * (arm == "rb") + 0.02 * rng.normal(),
            "kl": (0.5 + 0.1 * step) * (0.2 / beta) * (1 + 0.02 * rng.normal()),
        }
        for arm in ("mc", "rb")
        for beta in (0.1, 0.3)
        for seed in range(7)
        for step in range(6)
    ]


def imported(folder, log, columns=STEPS, **mapping):
    head = [*dict.fromkeys(columns.values())]
    text = "\n".join([",".join(head), *(",".join(str(row[key]) for key in head) for row in log)])
    (folder / "log.csv").write_text(text)
    content = {"name": "theirs", "columns": columns, "primary": {"control": "mc"}, **mapping}
    (folder / "mapping.yaml").write_text(yaml.safe_dump(content))
    import_runs(folder / "log.csv", folder / "mapping.yaml", folder / "theirs")
    return load_assessment(folder / "theirs")


def each(arm, key, of):
    """A change of one metric of an arm, where `of` maps a row."""
    return lambda log: [row | {key: of(row)} if row["arm"] == arm else row for row in log]


def of_run(edit, arm="mc", beta=0.1, seed=0):
    """A change of the rows of one run; `edit` maps a row to a row, or to None."""

    def change(log):
        where = {"arm": arm, "beta": beta, "seed": seed}
        mine = [row if not where.items() <= row.items() else edit(row) for row in log]
        return [row for row in mine if row is not None]

    return change


def again(log, *, digit=0.0, seed=4, columns=("reward", "kl")):
    """The log with the first run of rb as that of another seed."""
    source = {row["step"]: row for row in log if (row["arm"], row["beta"], row["seed"]) == ("rb", 0.1, 0)}

    def edit(row):
        values = {key: source[row["step"]][key] for key in columns}
        return row | values | {"kl": values["kl"] + digit * (row["step"] == 5)}

    return of_run(edit, "rb", 0.1, seed)(log)


last = [row for row in rows() if row["step"] == 5]
# What is changed, further keys of the mapping, whether there is no verdict, and the line.
IMPORTS = {
    "rewards times three": (
        each("rb", "reward", lambda row: 3 * row["reward"]),
        {},
        True,
        "another scale or sign",
    ),
    "the sign of the control's rewards": (
        each("mc", "reward", lambda row: -row["reward"]),
        {},
        True,
        "another scale or sign, or a penalty within? `reward_unit: task` in the mapping states",
    ),
    "rewards of the control that are penalised": (
        each("mc", "reward", lambda row: row["reward"] - row["beta"] * row["kl"]),
        {"kl_unit": "sequence"},
        False,
        "`reward_unit: task` (all rewards are of one function, scale and sign, and none contains",
    ),
    "no rewards of the control": (
        each("mc", "reward", lambda row: 0.0),
        STATED,
        False,
        "all 14 runs of mc have the same reward, 0: was it computed",
    ),
    "no KLs of one arm": (
        each("rb", "kl", lambda row: 0.0),
        STATED,
        False,
        "all 14 runs of rb have the same KL, 0: was it computed",
    ),
    "KL per token of few tokens": (
        each("rb", "kl", lambda row: row["kl"] / 5),
        {},
        False,
        "summed over a compl",
    ),
    "KL(reference || policy) in one arm": (
        each("rb", "kl", lambda row: 0.8 * row["kl"]),
        {"reward_unit": "task"},
        False,
        "`kl_unit: sequence` (all KLs are KL(policy ‖ reference), summed over a completion)",
    ),
    "a negative mean KL": (each("rb", "kl", lambda row: -row["kl"]), STATED, True, "the mean KL of rb"),
    "a run of the control cut short": (
        of_run(lambda row: row if row["step"] < 4 else None),
        STATED,
        True,
        "the runs end at different steps",
    ),
    "a run left out": (
        of_run(lambda row: None),
        STATED | {"incomplete": "leave_out_replicate"},
        False,
        "is worse), the verdict would be: rb against mc better",
    ),
    "results copied": (
        lambda log: again(last),
        STATED | {"columns": FINALS},
        True,
        "2 of 2 results are those of",
    ),
    "results copied with a digit moved": (
        lambda log: again(last, digit=0.001),
        STATED | {"columns": FINALS},
        False,
        "1 of 2 results are those of",
    ),
    "seeds of one arm": (
        each("rb", "seed", lambda row: row["seed"] + 10),
        STATED,
        True,
        "28 of 56 runs are missing",
    ),
    "rows twice": (lambda log: log + log[-7:], STATED, False, "7 rows stood twice"),
}


def test_without_an_attack_an_import_is_better(tmp_path):
    assessment = imported(tmp_path, rows(), **STATED)
    assert [one.primary.outcome for one in assessment.comparisons] == [Outcome.BETTER]
    (told,) = assessment.sweep.problems
    assert "they were not scored by the common evaluator" in told.text


@pytest.mark.parametrize("name", IMPORTS)
def test_an_attack_on_an_import(name, tmp_path, undrawn):
    attack, mapping, withheld, line = IMPORTS[name]
    assessment = imported(tmp_path, attack(rows()), **mapping)
    told = [*(problem.text for problem in assessment.sweep.problems), assessment.worst]
    assert any(line in text for text in told), told
    assert bool(assessment.withheld) is withheld


def test_lost_runs_of_the_control_are_taken_as_its_best(tmp_path):
    """As its worst they would make a small gain of the other arm a better one."""
    write_sweep(tmp_path, replicates=8, betas={0: 0.1, 1: 0.3}, lift={ARM: 0.1})
    lost(tmp_path)
    assert load_assessment(tmp_path).worst.endswith(f"{ARM} against {CONTROL} inconclusive.")
