"""Logs of other software changed so that an arm looks better: no verdict, or a line on the page."""

import numpy as np
import pytest
import yaml

from analysis.imports.imported import import_runs
from analysis.report.assessment import load_assessment
from analysis.stats import Outcome

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
        edited = [row if not where.items() <= row.items() else edit(row) for row in log]
        return [row for row in edited if row is not None]

    return change


def again(log, *, digit=0.0):
    """The log with the first run of rb as that of another seed."""
    source = {row["step"]: row for row in log if (row["arm"], row["beta"], row["seed"]) == ("rb", 0.1, 0)}

    def edit(row):
        values = {key: source[row["step"]][key] for key in ("reward", "kl")}
        return row | values | {"kl": values["kl"] + digit * (row["step"] == 5)}

    return of_run(edit, "rb", 0.1, 4)(log)


last = [row for row in rows() if row["step"] == 5]
KL, REWARD = {"kl_unit": "sequence"}, {"reward_unit": "task"}
LEFT_OUT, ONCE = STATED | {"incomplete": "leave_out_replicate"}, STATED | {"columns": FINALS}
SCALE = "another scale or sign, or a penalty within? `reward_unit: task` in the mapping states"
TASK = "without the KL penalty? If so, add `reward_unit: task` to the mapping"
SUMMED = "KL(policy ‖ reference), summed over a completion? If so, add `kl_unit: sequence` to the mapping"
# What is changed, further keys of the mapping, whether there is no verdict, and the line.
IMPORTS = {
    "rewards times three": (
        each("rb", "reward", lambda row: 3 * row["reward"]),
        {},
        True,
        "another scale or sign",
    ),
    "the sign of rewards": (each("mc", "reward", lambda row: -row["reward"]), {}, True, SCALE),
    "penalised": (each("mc", "reward", lambda row: row["reward"] - row["beta"] * row["kl"]), KL, False, TASK),
    "no rewards of the control": (
        *(each("mc", "reward", lambda row: 0.0), STATED, False),
        "all 14 runs of mc have the same reward, 0: was it computed",
    ),
    "no KLs of one arm": (
        *(each("rb", "kl", lambda row: 0.0), STATED, False),
        "all 14 runs of rb have the same KL, 0: was it computed",
    ),
    "KL per token of few tokens": (
        each("rb", "kl", lambda row: row["kl"] / 5),
        {},
        False,
        "summed over a compl",
    ),
    "KL(reference || policy)": (each("rb", "kl", lambda row: 0.8 * row["kl"]), REWARD, False, SUMMED),
    "a negative mean KL": (each("rb", "kl", lambda row: -row["kl"]), STATED, True, "the mean KL of rb"),
    "a run of the control cut short": (
        *(of_run(lambda row: row if row["step"] < 4 else None), STATED, True),
        "the runs end at different steps",
    ),
    "a run left out": (
        *(of_run(lambda row: None), LEFT_OUT, False),
        "is worse), the verdict would be: rb against mc better",
    ),
    "results copied": (lambda log: again(last), ONCE, True, "2 of 2 results are those of"),
    "a digit moved": (lambda log: again(last, digit=0.001), ONCE, False, "1 of 2 results are those of"),
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
    (problem,) = assessment.sweep.problems
    assert "they were not scored by the common evaluator" in problem.text


@pytest.mark.parametrize("name", IMPORTS)
def test_an_attack_on_an_import(name, tmp_path, undrawn):
    attack, mapping, withheld, line = IMPORTS[name]
    assessment = imported(tmp_path, attack(rows()), **mapping)
    lines = [*(problem.text for problem in assessment.sweep.problems), assessment.worst]
    assert any(line in text for text in lines), lines
    assert bool(assessment.withheld) is withheld
