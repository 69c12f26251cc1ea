"""Two processes against one with the same global batch: rollouts, gradients, metrics, resuming."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from lit_klrb.distributed import check_strategy
from lit_klrb.errors import ConfigurationError

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
BATCH = {"rloo": 4, "dpo": 4, "sft": 8, "reward": 8}


def fit(chain, stage, run, *extra):
    """In processes of their own, as users start it."""
    argv = chain.commands.argv("fit", stage, "--data.batch_size", str(BATCH[stage]), *extra, run=run)
    argv += ["--trainer.callbacks+=cli_keeper.GradientKeeper"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "lit_klrb", *argv]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300)


def metrics(run):
    with next(run.glob("metrics/*/metrics.csv")).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["step"], k): float(v) for row in rows for k, v in row.items() if v and k != "epoch"}


@pytest.mark.parametrize(
    "stage", ["rloo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("sft", "dpo", "reward"))]
)
def test_two_processes_do_what_one_does(chain, tmp_path, stage):
    estimator = ["--kl.estimator", "RaoBlackwellControlVariate"] if stage == "rloo" else []
    one, two = tmp_path / "one", tmp_path / "two"
    fit(chain, stage, one, *estimator)
    fit(chain, stage, two, *estimator, "--data.batch_size", str(BATCH[stage] // 2), *TWO)
    for step in range(2):
        first, second = (torch.load(run / f"gradients_{step}.pt") for run in (one, two))
        assert first.keys() == second.keys()
        for key, gradient in first.items():
            assert torch.allclose(second[key], gradient, rtol=1e-4, atol=2e-6), (step, key)
    if stage == "rloo":
        completions, weights = torch.load(one / "rollout_0_0.pt")
        parts = [torch.load(two / f"rollout_0_{rank}.pt") for rank in range(2)]
        assert torch.equal(torch.cat([part[0] for part in parts]), completions)
        assert torch.allclose(torch.cat([part[1] for part in parts]), weights, rtol=1e-3, atol=1e-5)
        assert torch.load(one / "token_values_0_0.pt") is None  # nothing to fit to yet
        table = torch.load(one / "token_values_2_0.pt")
        assert table.any()
        for rank in range(2):
            assert torch.equal(torch.load(two / f"token_values_2_{rank}.pt"), table)
    first, second = metrics(one), metrics(two)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert second[key] == pytest.approx(value, rel=1e-2, abs=1e-3), key
    assert (two / "summary.json").exists()
    assert not (tmp_path / "two.1").exists()


def test_what_would_shard_the_policy_is_refused():
    with pytest.raises(ConfigurationError, match=r"trainer.strategy: FSDPStrategy is not supported"):
        check_strategy(SimpleNamespace(strategy=FSDPStrategy()))


def test_two_processes_resume_bit_for_bit_in_the_middle_of_a_rollout(chain, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    keep = ("--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.every_n_train_steps", "3")
    keep += ("--trainer.callbacks.save_top_k", "-1", "--trainer.callbacks.filename", "{step}")
    keep += ("--trainer.callbacks.dirpath", str(tmp_path))
    options = ("--data.batch_size", "2", "--model.schedule", "constant", *TWO, *keep)
    fit(chain, "rloo", straight, *options)
    fit(chain, "rloo", resumed, *options, "--ckpt_path", str(tmp_path / "step=3.ckpt"))
    assert [(resumed / f"gradients_{step}.pt").exists() for step in (2, 3)] == [False, True]
    first, second = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (straight, resumed)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
