"""A run killed again and again, at any moment, ends like an undisturbed one, bit for bit."""

import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

KILLS = 20
LONG = ["--trainer.max_steps", "90", "--trainer.val_check_interval", "5", "--model.mini_batches", "2"]
EVERY_STEP = ["--checkpoint.every_n_train_steps", "1"]


def start(argv):
    return subprocess.Popen(
        [sys.executable, "-m", "lit_klrb", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def steps_logged(run):
    """The last step in any attempt's metrics."""
    steps = [-1]
    for path in run.glob("metrics/attempt_*/metrics.csv"):
        with path.open(newline="") as file:
            steps += [int(row["step"]) for row in csv.DictReader(file) if row.get("step")]
    return max(steps)


def curves(run):
    found = {}
    for path in sorted(run.glob("metrics/attempt_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                found.update(
                    {(name, row["step"]): value for name, value in row.items() if value and "/" in name}
                )
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_at_random_moments_ends_like_an_undisturbed_one(chain, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert chain.run("fit", "rloo", *EVERY_STEP, *LONG, run=whole) == 0
    argv = chain.commands.argv("fit", "rloo", *EVERY_STEP, *LONG, run=run)
    checkpoint, draw, cuts = run / "checkpoints" / "last.ckpt", random.Random(0), []
    while len(cuts) < KILLS:
        resume = ["--ckpt_path", str(checkpoint)] if checkpoint.exists() else []
        if not resume:  # it would be set aside
            shutil.rmtree(run, ignore_errors=True)
        process = start([*argv, *resume])
        # However fast the machine is, the kills are spread over steps, rollouts, validations and writes.
        reached = steps_logged(run) + draw.randint(1, 5)
        while steps_logged(run) < reached and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        ended = process.poll() is not None
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        cuts.append(steps_logged(run))
        if ended:
            break
    print("last step logged before each kill:", cuts)
    resume = ["--ckpt_path", str(checkpoint)] if checkpoint.exists() else []
    assert start([*argv, *resume]).wait() == 0
    first, other = (
        torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for path in (whole, run)
    )
    assert all(torch.equal(first[key], other[key]) for key in first)
    assert (whole / "summary.json").read_text() == (run / "summary.json").read_text()
    assert curves(whole) == curves(run)
    assert len(set(cuts)) == len(cuts) == KILLS
