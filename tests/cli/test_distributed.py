"""Two processes compared with one with the same global batch: rollouts, gradients, metrics, resuming."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from runs import in_processes, rows_of
from transformers import AutoModelForCausalLM

from benchmarks.kills.children import Child
from lit_klrb import schema
from lit_klrb.cli.main import main
from lit_klrb.distributed import check_strategy
from lit_klrb.errors import ConfigurationError
from lit_klrb.run.checkpoints import digest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
SHARDED = (
    *TWO[:3],
    "ModelParallelStrategy",
    *("--trainer.strategy.data_parallel_size", "2"),
    *("--trainer.strategy.tensor_parallel_size", "1"),
    *("--trainer.strategy.save_distributed_checkpoint", "false"),
)
BATCH = {"rloo": 4, "dpo": 4, "distill": 4, "sft": 8, "reward": 8}
KEEPER = "--trainer.callbacks+=cli_keeper.GradientKeeper"
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def fit(chain, stage, run, *extra):
    """In as many processes as asked for."""
    argv = chain.commands.argv("fit", stage, *extra, KEEPER, run=run)
    in_processes(2 if TWO[0] in extra else 1, main, argv, run.with_suffix(".log"))


@pytest.fixture(scope="module")
def rloo(chain, tmp_path_factory):
    """The same run in one process, in two, and sharded, with checkpoints after each third step."""
    root = tmp_path_factory.mktemp("rloo")
    options = ("--model.schedule", "constant", "--kl.estimator", "RaoBlackwellControlVariate")
    options += ("--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.every_n_train_steps", "3")
    options += ("--trainer.callbacks.save_top_k", "-1", "--trainer.callbacks.filename", "{step}")
    half = ("--data.batch_size", "2")
    for name, more in {"one": (), "two": (*half, *TWO), "sharded": (*half, *SHARDED)}.items():
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
    return {(row["step"], k): float(v) for row in rows_of(run) for k, v in row.items() if v and k != "epoch"}


def check_same_gradients(one, two):
    for step in range(2):
        first, second = (torch.load(run / f"gradients_{step}.pt") for run in (one, two))
        assert first.keys() == second.keys()
        for key, gradient in first.items():
            assert torch.allclose(second[key], gradient, rtol=1e-4, atol=2e-6), (step, key)


def check_same(one, two):
    """Gradients and metrics of two processes are those of one."""
    check_same_gradients(one, two)
    first, second = metrics(one), metrics(two)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert second[key] == pytest.approx(value, rel=1e-2, abs=1e-3, nan_ok=True), key
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


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_two_processes_equal_one(rloo, name):
    one, two = rloo.root / "one", rloo.root / name
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


def test_a_process_holds_half_of_a_sharded_model(rloo):
    held = {name: torch.load(rloo.root / name / "held_0.pt") for name in ("one", "two", "sharded")}
    assert held["two"] == held["one"]
    assert held["sharded"] == pytest.approx(held["one"] / 2, rel=0.01)


def test_a_sharded_policy_is_exported_whole(rloo, tmp_path):
    run, exported = rloo.root / "sharded", str(tmp_path / "exported")
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert main(["export", "--ckpt_path", str(checkpoint), "--output_dir", exported]) == 0
    policy = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    unsharded = torch.load(rloo.root / "one" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert {f"policy.{name}" for name in policy} == unsharded.keys()
    for name, weight in policy.items():
        # Steps of Adam amplify rounding
        torch.testing.assert_close(weight, unsharded[f"policy.{name}"], rtol=0, atol=2e-4)
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert json.loads((run / "summary.json").read_text())[schema.WEIGHTS] == digest(weights)


@pytest.mark.slow  # the same for each module
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("sft", ()),
        ("dpo", ()),
        ("reward", ()),
        ("distill", ("--kl.estimator", "RaoBlackwellTokenValues", "--model.schedule", "constant")),
    ],
)
def test_two_processes_equal_one_for_other_modules(chain, tmp_path, stage, options):
    one, two = tmp_path / "one", tmp_path / "two"
    fit(chain, stage, one, *options)
    fit(chain, stage, two, *options, "--data.batch_size", str(BATCH[stage] // 2), *TWO)
    check_same(one, two)


@pytest.mark.slow  # two interpreters load all libraries
def test_one_command_starts_both_processes(chain, tmp_path):
    argv = chain.commands.argv("fit", "rloo", "--data.batch_size", "2", *TWO, KEEPER, run=tmp_path / "run")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT)))}
    command = [sys.executable, "-m", "lit_klrb", *argv]
    subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300)
    assert [(tmp_path / "run" / f"rollout_0_{rank}.pt").exists() for rank in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (FSDPStrategy(), "trainer.strategy: FSDPStrategy is not supported; use ddp"),
        (ModelParallelStrategy(), "trainer.strategy.data_parallel_size: must be 2, got auto"),
        (ModelParallelStrategy(2, 2), "trainer.strategy.tensor_parallel_size: must be 1, got 2"),
        (ModelParallelStrategy(2, 1), "trainer.strategy.save_distributed_checkpoint: must be false, got"),
    ],
)
def test_other_strategies_are_refused(strategy, message):
    with pytest.raises(ConfigurationError, match=message):
        check_strategy(SimpleNamespace(strategy=strategy, num_devices=2, num_nodes=1))


def fails_unless_refused(argvs):
    """0 if each command ends with code 2. It is forked, as the first one starts a group of one process."""
    return {main(argv) for argv in argvs} != {2}


def test_what_needs_whole_models_is_refused_with_sharded_ones(chain, tmp_path):
    one = [*SHARDED[2:5], "1", *SHARDED[6:]]
    refused = {
        ("dpo",): "error: trainer.strategy: ModelParallelStrategy does not support DPOModule",
        ("rloo", "--model.lora", "{r: 2}"): "error: trainer.strategy: ModelParallelStrategy .* adapter",
        (
            *("rloo", "--model.inner_epochs", "1", "--model.reference_path", "policy"),
        ): "error: model.init_args.reference_path: 'policy' is not supported by ModelP",
        ("rloo", "--trainer.callbacks+=GradientNoiseStudy"): "error: trainer.callbacks: GradientNoiseS",
        ("rloo", *one[:3], "2"): "error: trainer.strategy.data_parallel_size: must be 1, got 2",
    }
    argvs = [
        chain.commands.argv("fit", stage, *one, *options, run=tmp_path / "run") for stage, *options in refused
    ]
    log = tmp_path / "log"
    with Child(fails_unless_refused, argvs, log, {}) as child:
        assert child.wait() == 0, log.read_text()
    errors = [line for line in log.read_text().splitlines() if "kept" not in line and "is back" not in line]
    assert len(errors) == len(refused), errors
    for error, message in zip(errors, refused.values(), strict=True):
        assert re.match(message, error)


@pytest.mark.parametrize("kind", ["two", "sharded"])
def test_two_processes_resume_bit_exactly_within_a_rollout(chain, rloo, kind):
    straight, resumed = rloo.root / kind, rloo.root / f"{kind}_resumed"
    kept = rloo.root / f"{kind}_kept"
    options = ("--trainer.callbacks.dirpath", str(kept), "--data.batch_size", "2")
    resume = ("--ckpt_path", str(kept / "step=3.ckpt"))
    fit(chain, "rloo", resumed, *rloo.options, *options, *{"two": TWO, "sharded": SHARDED}[kind], *resume)
    assert [(resumed / f"gradients_{step}.pt").exists() for step in (2, 3)] == [False, True]
    first, second = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (straight, resumed)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
