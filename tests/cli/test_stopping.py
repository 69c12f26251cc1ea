"""Ctrl-C and SIGTERM: the checkpoint, the command that resumes, the exit code."""

import os
import re
import signal
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from runs import assert_same_run, resume_command, signals_heard, with_callback  # noqa: F401

from lit_klrb.cli.main import main

pytestmark = pytest.mark.usefixtures("signals_heard")
CTRL_C, SIGTERM = signal.SIGINT, signal.SIGTERM


class Signal(Callback):
    """Sends a signal to this process when a hook is called for the n-th time."""

    def __init__(self, number, hook, count):
        self.number, self.left = number, count
        setattr(self, hook, self.send)

    def send(self, *_, **__):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def signalled(chain, monkeypatch):
    """Run a command that receives a signal in a hook; return its exit code."""

    def run(number, hook, count, *arguments, **keywords):
        with monkeypatch.context() as patched:
            with_callback(patched, Signal(number, hook, count))
            return chain.run(*arguments, **keywords)

    return run


@pytest.mark.parametrize(("stage", "number"), [("sft", CTRL_C), ("rloo", SIGTERM)])
def test_a_signal_saves_and_the_printed_command_goes_on(chain, signalled, tmp_path, capsys, stage, number):
    run = tmp_path / "a run"  # with a space: the command must be quoted
    assert signalled(number, "on_after_backward", 3, "fit", stage, run=run) == 128 + number
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped by")]
    assert line.startswith(f"stopped by {'SIGTERM' if number == SIGTERM else 'Ctrl-C'}; to resume: ")
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert not (run / "summary.json").exists()
    assert main(resume_command(line)) == 0
    assert_same_run(chain.root / stage, run)


@pytest.mark.parametrize(("left", "warned"), [(0, True), (1000, False)])
def test_a_warning_of_slurm_saves_requeues_and_says_if_it_came_too_late(
    chain, signalled, tmp_path, capsys, monkeypatch, left, warned
):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left))
    saves, run = ["--checkpoint.every_n_train_steps", "1"], tmp_path / "run"
    assert signalled(signal.SIGUSR1, "on_after_backward", 3, "fit", "sft", *saves, run=run) == 138
    printed = capsys.readouterr().err
    assert "SLURM's job 7 is requeued" in printed
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert (
        bool(re.search(r"SLURM ends this job in 0 s, and a save took \d+ s: submit it with", printed))
        == warned
    )
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.parametrize(
    ("hook", "count", "step"),
    [
        ("on_train_batch_start", 1, 0),
        ("on_train_batch_end", 6, 6),
        ("on_validation_batch_start", 2, 3),
        ("on_train_end", 1, 6),
    ],
)
def test_at_whatever_moment_it_comes(chain, signalled, tmp_path, capsys, hook, count, step):
    """The second validation is the one after three steps; the first is before any."""
    code = signalled(SIGTERM, hook, count, "fit", "rloo", run=tmp_path / "run")
    assert code == 143
    printed = capsys.readouterr().err
    if step == 0:
        assert "stopped by SIGTERM; nothing was trained yet" in printed
        assert not (tmp_path / "run").exists()
        return
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == step
    assert main(resume_command(printed)) == 0
    assert_same_run(chain.root / "rloo", tmp_path / "run")


def test_within_an_optimizer_step_it_waits(chain, signalled, tmp_path, capsys):
    parts = ["--trainer.max_steps", "4", "--trainer.accumulate_grad_batches", "2"]
    assert chain.run("fit", "rloo", *parts, run=tmp_path / "whole") == 0
    code = signalled(SIGTERM, "on_train_batch_end", 5, "fit", "rloo", *parts, run=tmp_path / "run")
    assert code == 143
    assert main(resume_command(capsys.readouterr().err)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("hook", ["setup", "on_sanity_check_start"])
def test_before_the_first_step_there_is_nothing_to_save(signalled, tmp_path, capsys, hook):
    code = signalled(CTRL_C, hook, 1, "fit", "sft", run=tmp_path / "run")
    assert code == 130
    assert "stopped by Ctrl-C; nothing was trained yet" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_stopped_before_its_first_step_can_be_resumed_again(chain, signalled, tmp_path, capsys):
    run = tmp_path / "run"
    assert signalled(SIGTERM, "on_after_backward", 3, "fit", "rloo", run=run) == 143
    resume = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    for hook in ("on_fit_start", "on_train_batch_start"):
        capsys.readouterr()
        assert signalled(SIGTERM, hook, 1, "fit", "rloo", *resume, run=run) == 143
    assert main(resume_command(capsys.readouterr().err)) == 0
    assert_same_run(chain.root / "rloo", run)


def test_evaluations_stop_at_once(chain, signalled, tmp_path, capsys):
    extra = ["--ckpt_path", chain.checkpoint("rloo")]
    for command, hook in (("validate", "on_validation_batch_start"), ("predict", "on_predict_batch_start")):
        code = signalled(CTRL_C, hook, 1, command, "rloo", *extra, run=tmp_path / "run")
        assert code == 130
        assert capsys.readouterr().err == "stopped by Ctrl-C\n"
    assert not (tmp_path / "run").exists()


def test_a_dry_run_saves_nothing(signalled, tmp_path, capsys):
    extra = ["--trainer.fast_dev_run", "3"]
    code = signalled(SIGTERM, "on_after_backward", 1, "fit", "rloo", *extra, run=tmp_path / "run")
    assert code == 143
    assert not (tmp_path / "run").exists()
