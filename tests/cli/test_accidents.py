"""Full disks, concurrent runs, failed starts and custom loggers: no data of a run are lost."""

import errno
import importlib
import os
import shlex
import sys

import pytest
from runs import contents, differences, weights_of

from lit_klrb.cli.main import main
from lit_klrb.run import checkpoints
from lit_klrb.run.directory import RunDirectory


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(chain, tmp_path, monkeypatch, capsys):
    written, write = [], checkpoints.write_beside

    def write_beside(target, content):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        written.append(target)
        return write(target, content)

    run = tmp_path / "run"
    with monkeypatch.context() as full:
        full.setattr(checkpoints, "write_beside", write_beside)
        assert chain.run("fit", "rloo", "--checkpoint.every_n_train_steps", "1", run=run) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    said, _, command = line.partition("; to resume: ")
    assert said == f"error: No space left on device, in the run of {run}; earlier files are whole"
    assert main(shlex.split(command)[1:]) == 0
    assert not [*differences(weights_of(run), weights_of(chain.root / "rloo"))]


JUDGE = """
calls, errors = [], []

def judge(texts):
    calls.append(1)
    if len(calls) == 5 and errors:
        raise errors.pop()
    return [float(len(text)) for text in texts]
"""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (TimeoutError("judge took too long"), 69, "TimeoutError: judge took too long, after 0 retries; "),
        (ValueError("no number in it"), 1, "ValueError: no number in it ("),
    ],
)
def test_a_reward_that_fails_once_leaves_the_command_that_resumes(
    chain, tmp_path, monkeypatch, capsys, error, code, line
):
    """ms-swift#8123, hydra#1462: code 2 and no hint, which blocks an arm of a sweep."""
    name = f"judge_{code}"
    (tmp_path / f"{name}.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name).errors.append(error)
    reward = ["--model.reward_path", f"{name}:judge", "--model.reward_retries", "0"]
    run = tmp_path / "run"
    assert chain.run("fit", "rloo", *reward, "--checkpoint.every_n_train_steps", "1", run=run) == code
    said, _, command = capsys.readouterr().err.strip().splitlines()[-1].partition("to resume: ")
    assert said.startswith(f"error: model.init_args.reward_path: {line}")
    assert main(shlex.split(command)[1:]) == 0
    assert chain.run("fit", "rloo", *reward, run=tmp_path / "whole") == 0
    assert not [*differences(weights_of(run), weights_of(tmp_path / "whole"))]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--data.source", "/no/where.jsonl"],
        ["--model.max_new_tokens", "1000"],
        ["--model.reward_path", "math:sqrt"],
        ["--trainer.callbacks+=EstimationStudy", "--trainer.callbacks.prompts", "1000"],
    ],
    ids=lambda wrong: wrong[0],
)
def test_failing_starts_leave_a_good_run_where_it_is(chain, tmp_path, wrong):
    run = tmp_path / "run"
    with RunDirectory(run) as directory:
        directory.begin()
        for name in ("config.yaml", "summary.json", "checkpoints/last.ckpt"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text(f"the good run's {name}")
    before = contents(tmp_path)
    for _ in range(2):
        assert chain.run("fit", "rloo", *wrong, run=run) == 2
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("at", [0, 2])
def test_code_that_ends_the_program_does_not_end_a_run_as_if_it_were_done(
    chain, tmp_path, monkeypatch, capsys, at
):
    (tmp_path / "ending.py").write_text(
        "import sys\n\n\ndef reward(completions, trainer_state):\n"
        f"    if trainer_state.global_step == {at}:\n        sys.exit(0)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ending", raising=False)
    ending = ["--model.reward_path", "ending:reward", "--checkpoint.every_n_train_steps", "1"]
    assert chain.run("fit", "rloo", *ending, run=tmp_path / "run") == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert f"sys.exit(0) was called in {tmp_path}/ending.py, line 6" in line
    assert ("to resume: " if at else "nothing was trained yet") in line
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_logger_of_ones_own_takes_nothing_from_the_runs_record(chain, tmp_path):
    run, own = tmp_path / "run", tmp_path / "own"
    options = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(own)]
    assert chain.run("fit", "sft", *options, run=run) == 0
    assert [*own.rglob("metrics.csv")]
    assert (run / "metrics" / "attempt_0" / "metrics.csv").stat().st_size > 100
    assert [*run.rglob("events.out.tfevents.*")]
