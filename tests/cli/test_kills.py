"""A run that is killed repeatedly at random times ends like an undisturbed one, bit for bit."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kills.children import BEGIN, Child
from benchmarks.kills.compare import different, torn
from lit_klrb.cli.main import main

ROOT = Path(__file__).parents[2]
EVERY_STEP = ["--checkpoint.every_n_train_steps", "1"]
LONG = ["--trainer.max_steps", "9", "--trainer.val_check_interval", "3", "--model.mini_batches", "2"]


def run_with_one_thread(argv):
    torch.set_num_threads(1)  # threads do not survive a fork
    return main(argv)


def test_a_run_that_is_killed_three_times_ends_like_an_undisturbed_one(chain, tmp_path):
    """At a random time, while a checkpoint is written, and after it."""
    whole, run, temporary = tmp_path / "whole", tmp_path / "run", tmp_path / "temporary"
    draw = random.Random(0)

    def child(run, *extra):
        argv = chain.commands.argv("fit", "rloo", *EVERY_STEP, *LONG, *extra, run=run)
        return Child(run_with_one_thread, argv, tmp_path / "log", {"TMPDIR": str(temporary)})

    with child(whole) as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.last_line
    resume = []
    for saves, delay in ((3, draw.uniform(0, 0.1)), (2, 0.0), (1, 0.01)):
        with child(run, *resume) as killed:
            assert killed.wait_for_save(saves), killed.last_line
            killed.wait(delay)
            assert killed.kill() < 0
        assert killed.heard.count(BEGIN) >= saves
        assert not torn(run)
        resume = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    with child(run, *resume) as last:
        assert last.wait() == 0, last.last_line
    assert not different(whole, run)
    assert not temporary.exists()


@pytest.mark.slow  # dozens of runs and a few sweeps; replication/evidence/kills.md has the table of hundreds
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
def test_kills_of_every_kind(tmp_path):
    command = [sys.executable, "-m", "benchmarks.kills", "--count", "5", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.strip().splitlines()[-4:]:
        _, _, kills, *_, wrong, _ = (cell.strip() for cell in line.split("|"))
        assert int(kills) >= 5
        assert wrong == "0"
