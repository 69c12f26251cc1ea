"""Two processes compared with one with the same global batch: rollouts, gradients, metrics, resuming."""

import csv
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from benchmarks.kills.children import Child
from lit_klrb.cli.main import main
from lit_klrb.distributed import check_strategy
from lit_klrb.errors import ConfigurationError

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
BATCH = {"rloo": 4, "dpo": 4, "sft": 8, "reward": 8}
KEEPER = "--trainer.callbacks+=cli_keeper.GradientKeeper"
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def run_with_one_thread(argv):
    torch.set_num_threads(1)  # a forked process has no others
    return main(argv)


def fit(chain, stage, run, *extra):
    """In as many processes as asked for, forked from this one, which has the libraries loaded."""
    argv = chain.commands.argv("fit", stage, *extra, KEEPER, run=run)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NODE_RANK": "0"}
    ranks = [group | {"LOCAL_RANK": str(rank)} for rank in range(2)] if "ddp" in extra else [{}]
    log = run.with_suffix(".log")
    with ExitStack() as running:
        children = [running.enter_context(Child(run_with_one_thread, argv, log, rank)) for rank in ranks]
        codes = [child.wait() for child in children]
    assert codes == [0] * len(ranks), log.read_text()


@pytest.fixture(scope="module")
def rloo(chain, tmp_path_factory):
    """The same run in one process and in two; the latter's checkpoints after three and four steps."""
    root = tmp_path_factory.mktemp("rloo")
    options = ("--model.schedule", "constant", "--kl.estimator", "RaoBlackwellControlVariate")
    options += ("--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.every_n_train_steps", "3")
    options += ("--trainer.callbacks.save_top_k", "-1", "--trainer.callbacks.filename", "{step}")
    for name, more in {"one": (), "two": ("--data.batch_size", "2", *TWO)}.items():
        fit(
            chain,
            "rloo",
            root / name,
            *options,
            "--trainer.callbacks.dirpath",
            str(root / f"{name}_kept"),
            *more,
        )
    return SimpleNamespace(root=root, options=options)


def metrics(run):
    with next(run.glob("metrics/*/metrics.csv")).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["step"], k): float(v) for row in rows for k, v in row.items() if v and k != "epoch"}


def check_same(one, two):
    """Gradients and metrics of two processes are those of one."""
    for step in range(2):
        first, second = (torch.load(run / f"gradients_{step}.pt") for run in (one, two))
        assert first.keys() == second.keys()
        for key, gradient in first.items():
            assert torch.allclose(second[key], gradient, rtol=1e-4, atol=2e-6), (step, key)
    first, second = metrics(one), metrics(two)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert second[key] == pytest.approx(value, rel=1e-2, abs=1e-3), key
    assert (two / "summary.json").exists()
    assert not two.with_name("two.1").exists()


def test_rewards_read_the_same_columns_in_two_processes(chain, tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    prompts = [f"{start} {noun}" for start in ("The", "This") for noun in ("film", "plot", "cast", "drama")]
    rows = [{"prompt": text, "sign": (-1) ** row} for row, text in enumerate(prompts)]
    for name, part in {"train": rows[:6], "validation": rows[6:]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    options = ("--data.source", str(folder), "--model.reward_path", "cli_rewards:signed_length")
    options += ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2")
    for name, more in {"one": (), "two": ("--data.batch_size", "2", *TWO)}.items():
        fit(chain, "rloo", tmp_path / name, *options, *more)
    check_same(tmp_path / "one", tmp_path / "two")
    assert metrics(tmp_path / "two")["0", "train/reward_se"] > 1


def test_two_processes_equal_one(rloo):
    one, two = rloo.root / "one", rloo.root / "two"
    check_same(one, two)
    completions, weights = torch.load(one / "rollout_0_0.pt")
    parts = [torch.load(two / f"rollout_0_{rank}.pt") for rank in range(2)]
    assert torch.equal(torch.cat([part[0] for part in parts]), completions)
    assert torch.allclose(torch.cat([part[1] for part in parts]), weights, rtol=1e-3, atol=1e-5)
    assert torch.load(one / "token_values_0_0.pt") is None  # nothing to fit to yet
    table = torch.load(one / "token_values_2_0.pt")
    assert table.any()
    for rank in range(2):
        assert torch.equal(torch.load(two / f"token_values_2_{rank}.pt"), table)


@pytest.mark.slow  # the same for each module
@pytest.mark.parametrize("stage", ["sft", "dpo", "reward"])
def test_two_processes_equal_one_for_other_modules(chain, tmp_path, stage):
    one, two = tmp_path / "one", tmp_path / "two"
    fit(chain, stage, one)
    fit(chain, stage, two, "--data.batch_size", str(BATCH[stage] // 2), *TWO)
    check_same(one, two)


@pytest.mark.slow  # two interpreters load all libraries
def test_one_command_starts_both_processes(chain, tmp_path):
    argv = chain.commands.argv("fit", "rloo", "--data.batch_size", "2", *TWO, KEEPER, run=tmp_path / "run")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT)))}
    command = [sys.executable, "-m", "lit_klrb", *argv]
    subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300)
    assert [(tmp_path / "run" / f"rollout_0_{rank}.pt").exists() for rank in range(2)] == [True, True]


def test_strategies_that_shard_the_policy_are_refused():
    with pytest.raises(ConfigurationError, match=r"trainer.strategy: FSDPStrategy is not supported"):
        check_strategy(SimpleNamespace(strategy=FSDPStrategy()))


def test_two_processes_resume_bit_exactly_within_a_rollout(chain, rloo):
    straight, resumed = rloo.root / "two", rloo.root / "resumed"
    kept = ("--trainer.callbacks.dirpath", str(rloo.root / "two_kept"))
    resume = ("--ckpt_path", str(rloo.root / "two_kept" / "step=3.ckpt"))
    fit(chain, "rloo", resumed, *rloo.options, *kept, "--data.batch_size", "2", *TWO, *resume)
    assert [(resumed / f"gradients_{step}.pt").exists() for step in (2, 3)] == [False, True]
    first, second = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (straight, resumed)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
