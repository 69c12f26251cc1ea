"""Imported runs of other software: the same statistics as for a sweep, with a caveat."""

import json

import numpy as np
import pytest
import yaml
from synthetic import write_sweep

import analysis
from analysis.checks import load_sweep
from analysis.cli import main
from analysis.report.assessment import load_assessment
from analysis.report.sections.summary import conditions, verdict_numbers

COLUMNS = {name: name for name in ("arm", "beta", "replicate", "seed", "reward", "kl")}
CAVEAT = "they were not scored by the common evaluator"


@pytest.fixture
def imported(tmp_path):
    """Import a log or a folder with a mapping; return the directory."""

    def imported(source, *, output="theirs", code=0, control="mc", **mapping):
        path = tmp_path / "mapping.yaml"
        content = {"name": "theirs", "primary": {"control": control}} | mapping
        path.write_text(yaml.safe_dump(content))
        where = tmp_path / output
        assert main(["import", str(source), "--config", str(path), "--output", str(where)]) == code
        return where

    return imported


def table(frame, path):
    frame[frame.arm.notna()].to_csv(path, na_rep="nan")
    return path


def verdicts(directory):
    """The verdict on each claim, as text, as NaN is not equal to itself."""
    (comparison,) = load_assessment(directory).comparisons
    return [str(sorted(verdict_numbers(verdict).items())) for verdict in comparison.verdicts]


def test_a_strangers_mapping_reads_nothing_of_the_environment(tmp_path, imported, monkeypatch):
    monkeypatch.setenv("READERS_KEY", "f00dfeed")
    log = tmp_path / "log.csv"
    log.write_text("arm,beta,replicate,reward,kl\nmc,1,0,1,1\nrb,1,0,2,1\n")
    text = "${oc.env:READERS_KEY} and ${name}"
    columns = {name: name for name in COLUMNS if name != "seed"}
    where = imported(log, columns=columns, setting=text, name="${oc.env:READERS_KEY}")
    plan = json.loads((where / "plan.json").read_text())["content"]["plan"]
    assert (plan["setting"], plan["name"]) == (text, "${oc.env:READERS_KEY}")
    assert not any(b"f00dfeed" in path.read_bytes() for path in where.rglob("*.json"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_sweep_has_the_same_statistics_after_export_and_import(tmp_path, imported, shared):
    own = write_sweep(tmp_path / "own", replicates=5, lift={"RaoBlackwell": 0.2})
    frame = analysis.frames(own).runs
    if shared:
        frame.seed = frame.replicate
    theirs = imported(table(frame, tmp_path / "own.csv"), columns=COLUMNS, control="MonteCarlo")
    assert load_assessment(theirs).comparisons[0].pairs.seeds_shared == shared
    assert (verdicts(theirs) == verdicts(own)) is not shared
    assert len(verdicts(own)) == 4
    said = [conditions(load_assessment(directory))[0][:25] for directory in (own, theirs)]
    assert said == ["All runs share one warm s", "Where imported runs start"]
    again = analysis.frames(theirs).runs
    both = [f[f.arm.notna()].set_index(["arm", "beta", "replicate"]).sort_index() for f in (frame, again)]
    for column in ("reward", "kl"):
        values = [np.where(f.state == "done", f[column], np.nan).astype(float) for f in both]
        np.testing.assert_array_equal(*values)
    assert [*both[0].seed] == [*both[1].seed]


def test_all_commands_read_an_import_and_name_it_as_one(tmp_path, imported, capsys):
    own = write_sweep(tmp_path / "own", replicates=3)
    theirs = imported(
        table(analysis.frames(own).runs, tmp_path / "own.csv"),
        columns=COLUMNS,
        primary={"control": "MonteCarlo", "margins": {"objective": 0.5}},
        setting="a toy.",
    )
    assert main(["report", str(theirs)]) == 0
    assert CAVEAT in (theirs / "report.html").read_text()
    numbers = json.loads((theirs / "results.json").read_text())
    assert any(CAVEAT in problem for problem in numbers["sections"]["execution"]["problems"])
    assert main(["verify", str(theirs)]) == 0
    sweep = load_sweep(theirs)
    assert (sweep.plan.primary.margins, sweep.plan.setting) == ({"objective": 0.5}, "a toy.")
    assert not sweep.invalid
    # the same import may be repeated, beside a report
    capsys.readouterr()
    imported(tmp_path / "own.csv", columns=COLUMNS, control="RaoBlackwell", code=2)
    assert "theirs holds something else; name a new directory" in capsys.readouterr().err


def test_an_interrupted_import_is_completed(tmp_path, imported):
    own = write_sweep(tmp_path / "own", replicates=2)
    log = table(analysis.frames(own).runs, tmp_path / "own.csv")
    theirs = imported(log, columns=COLUMNS, control="MonteCarlo")
    files = {path: path.read_bytes() for path in theirs.rglob("*.json")}
    sorted(theirs.glob("results/*.json"))[3].unlink()
    imported(log, columns=COLUMNS, control="MonteCarlo")
    assert {path: path.read_bytes() for path in theirs.rglob("*.json")} == files


def test_trainer_states_of_trl(request, imported, monkeypatch):
    """The log_history of eight runs of TRL 1.16, four steps each on a CPU."""
    folder = request.config.rootpath / "tests" / "analysis" / "results" / "trl_logs"
    monkeypatch.chdir(folder)
    columns = {"reward": "reward", "kl": "kl", "step": "step"}
    files = "{arm}-{beta}-{replicate}/trainer_state.json"
    sweep = load_sweep(imported(".", columns=columns, files=files, control="rloo"))
    assert not sweep.missing
    assert "imported from trl_logs: " in sweep.problems[0].text
    assert list(sweep.plan.grid.arms) == ["grpo", "rloo"]
    assert dict(sweep.plan.grid.beta) == {0: 0.05, 1: 0.2}
    run = sweep.grid["rloo", 0, 1]
    history = json.loads((folder / "rloo-0.05-1" / "trainer_state.json").read_text())["log_history"]
    assert run.final == {"reward": history[3]["reward"], "kl": history[3]["kl"]}
    assert run.curves["train/kl"].value.tolist() == [row["kl"] for row in history[:4]]
    # one seed at both betas: what is swapped are whole replicates
    assert load_assessment(sweep.directory).comparisons[0].pairs.seeds_shared


def test_a_wide_export_of_w_and_b(tmp_path, imported):
    names = {
        "fluffy-cloud-1": ("mc", 0),
        "misty-sea-2": ("rb", 0),
        "calm-hill-3": ("mc", 1),
        "old-oak-4": ("rb", 1),
    }
    header = ['"Step"']
    for name in names:
        for metric in ("objective/reward", "objective/kl"):
            header += [f'"{name} - {metric}{end}"' for end in ("", "__MIN", "__MAX")]
    rows = [",".join(header)]
    for step in (0, 10):
        cells = [f'"{step + number + 0.25 * k}"' for number in range(4) for k in range(2)]
        rows.append(",".join([f'"{step}"', *(cell for one in cells for cell in (one, '""', '""'))]))
    (tmp_path / "wandb.csv").write_text("\n".join(rows))
    theirs = imported(
        tmp_path / "wandb.csv",
        columns={"reward": "{run} - objective/reward", "kl": "{run} - objective/kl", "step": "Step"},
        runs={name: {"arm": arm, "beta": 0.1, "replicate": number} for name, (arm, number) in names.items()},
    )
    finals = {(arm, r): run.final for (arm, _, r), run in load_sweep(theirs).grid.items()}
    assert finals == {
        ("mc", 0): {"reward": 10.0, "kl": 10.25},
        ("rb", 0): {"reward": 11.0, "kl": 11.25},
        ("mc", 1): {"reward": 12.0, "kl": 12.25},
        ("rb", 1): {"reward": 13.0, "kl": 13.25},
    }


def test_files_of_verl_and_a_missing_run(tmp_path, imported):
    for arm, seed in (("mc", 1), ("mc", 2), ("rb", 1)):
        lines = [{"step": s, "data": {"critic/score/mean": s / 7, "actor/kl": seed}} for s in (1, 2)]
        path = tmp_path / "logs" / f"{arm}_s{seed}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, lines)))
    columns = {"reward": "data.critic/score/mean", "kl": "data.actor/kl", "step": "step"}
    runs = {
        f"{arm}_s{s}": {"arm": arm, "beta": 0.001, "replicate": s} for arm in ("mc", "rb") for s in (1, 2)
    }
    sweep = load_sweep(imported(tmp_path / "logs", files="{run}.jsonl", columns=columns, runs=runs))
    assert sweep.missing == [("rb", 0, 1)]
    assert not sweep.invalid
    assert sweep.grid["rb", 0, 0].cell.seed == 1


def test_replicates_are_numbered_by_name_or_separately_per_beta(tmp_path, imported):
    head, log = "arm,beta,replicate,reward,kl", tmp_path / "log.csv"

    def places(rows, output):
        lines = [
            f"{arm},{beta},{name},1,1"
            for beta, names in rows.items()
            for name in names
            for arm in ("mc", "rb")
        ]
        log.write_text("\n".join([head, *lines]))
        columns = {name: name for name in COLUMNS if name != "seed"}
        sweep = load_sweep(imported(log, columns=columns, output=output))
        seeds = {place[1:]: run.cell.seed for place, run in sweep.grid.items()}
        return seeds, len(sweep.missing)

    assert places({0.1: [10, 9], 0.2: [9, 10]}, "a") == ({(0, 0): 9, (0, 1): 10, (1, 0): 9, (1, 1): 10}, 0)
    assert places({0.1: [0, 1], 0.2: [2, 3]}, "b") == ({(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}, 0)
    assert places({0.1: [0, 1], 0.2: [1]}, "c") == ({(0, 0): 0, (0, 1): 1, (1, 1): 1}, 2)


def test_pairs_with_unequal_seeds_are_refused_by_the_reader(tmp_path, imported):
    (tmp_path / "log.csv").write_text("arm,beta,replicate,seed,reward,kl\nmc,1,0,5,1,1\nrb,1,0,6,1,1\n")
    assert "different seeds: [5, 6]" in load_sweep(imported(tmp_path / "log.csv", columns=COLUMNS)).invalid[0]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"columns": {"reward": "r"}}, "mapping.yaml: columns: kl is missing"),
        ({"columns": {**COLUMNS, "lr": "lr"}}, "mapping.yaml: columns: 'lr' is not allowed; one of: arm"),
        ({"columns": {**COLUMNS, "step": "epoch"}}, "columns.step: 'epoch' is in no row of"),
        ({"columns": {"reward": "reward", "kl": "kl"}}, "line 2: arm is unknown"),
        ({"columns": COLUMNS, "control": "ppo"}, "primary.control: 'ppo' is not allowed; one of: mc, rb"),
        ({"columns": COLUMNS, "margin": 1}, "mapping.yaml: margin: there is no such key; one of: columns"),
        ({"columns": COLUMNS, "files": "../{arm}.csv"}, "files: '../{arm}.csv' is not allowed; a path below"),
        ({"columns": COLUMNS, "files": "{arm}.jsonl"}, "files: no file of"),
        ({"columns": {**COLUMNS, "reward": "{run} r"}}, "columns.reward: no column of"),
        ({"columns": {**COLUMNS, "run": "arm"}}, "line 2: the run 'mc' is not among the mapping's `runs`"),
        ({"columns": COLUMNS, "runs": {"x": {"lr": 1}}}, "runs.x: 'lr' is not allowed; one of: arm, beta"),
    ],
)
def test_errors_of_an_import_are_one_line_and_nothing_is_written(
    tmp_path, imported, capsys, mapping, message
):
    log = tmp_path / "log.csv"
    log.write_text("arm,beta,replicate,seed,reward,kl\nmc,1,0,0,1,1\nrb,1,0,0,1,1\n")
    theirs = imported(tmp_path if "files" in mapping else log, code=2, **mapping)
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not theirs.exists()


def logged(path, ends, *, kl_of=lambda arm: 1.0):
    """A log with four steps of two arms; `ends` are the last rewards of the first run of mc."""
    rows = ["arm,beta,replicate,step,reward,kl"]
    for arm in ("mc", "rb"):
        for replicate in range(3):
            rewards = [1.0 + replicate / 9, 2.0, 3.0, 4.0 + replicate / 7]
            if (arm, replicate) == ("mc", 0):
                rewards = [*rewards[: 4 - len(ends)], *ends]
            kl = kl_of(arm) * (1 + replicate / 10)
            rows += [f"{arm},0.1,{replicate},{step},{reward},{kl}" for step, reward in enumerate(rewards)]
    path.write_text("\n".join(rows) + "\n")
    return path


STEPS = {name: name for name in ("arm", "beta", "replicate", "step", "reward", "kl")}


def test_a_log_whose_last_row_is_nan_is_no_divergence(tmp_path, imported):
    sweep = load_sweep(imported(logged(tmp_path / "a.csv", ["nan"]), columns=STEPS))
    (problem,) = sweep.invalid
    assert "mc, β = 0.1, replicate 0: the log ends without a number" in problem
    assert not any(run.diverged for run in sweep.grid.values())
    assert ("mc", 0, 0) not in sweep.grid
    ended = load_sweep(imported(logged(tmp_path / "b.csv", ["nan"] * 3), columns=STEPS, output="ended"))
    assert not ended.invalid
    assert [run.diverged for run in ended.grid.values()] == [True, False, False, False, False, False]


def test_kls_of_tokens_beside_those_of_completions_give_no_verdict(tmp_path, imported):
    log = logged(tmp_path / "a.csv", [], kl_of=lambda arm: 30.0 if arm == "mc" else 1.0)
    (problem,) = load_sweep(imported(log, columns=STEPS)).invalid
    assert "at beta 0.1 the KL of mc is 30 times that of rb: per completion beside per token?" in problem
    stated = imported(log, columns=STEPS, kl_unit="sequence", output="stated")
    assert not load_sweep(stated).invalid
    imported(log, columns=STEPS, kl_unit="token", output="token", code=2)


def log_without(path, *lost):
    """A log of three replicates at two betas, without some runs."""
    runs = [(arm, beta, r) for arm in ("mc", "rb") for beta in (0.1, 0.3) for r in range(3)]
    kept = [run for run in runs if run not in lost]
    rows = [f"{arm},{beta},{r},{r},{1 + beta + r / 10},{r + 1}" for arm, beta, r in kept]
    path.write_text("\n".join(["arm,beta,replicate,seed,reward,kl", *rows, ""]))
    return path


def test_an_import_may_leave_out_the_replicates_of_missing_runs(tmp_path, imported):
    log = log_without(tmp_path / "log.csv", ("rb", 0.1, 2))
    sweep = load_sweep(imported(log, columns=COLUMNS, incomplete="leave_out_replicate"))
    assert sweep.missing == []
    assert list(sweep.lost) == [("rb", 0, 2)]
    assert [run.cell.place for run in sweep.left_out] == [("mc", 0, 2)]
    assert ("mc", 0, 2) not in sweep.grid
    assert len(sweep.grid) == 10
    (problem,) = (one.text for one in sweep.problems if "missing" in one.text)
    assert problem.startswith("1 of 12 runs are missing: rb, β = 0.1, replicate 2; left out with them")
