"""Two processes compared with one with the same global batch: rollouts, gradients, metrics, resuming."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from runs import exit_codes, in_processes, resume_command, rows_of, weights_of, with_callback
from served_teacher import TeacherServer
from transformers import AutoModelForCausalLM

from benchmarks.kills.children import Child
from lit_klrb import schema
from lit_klrb.cli.main import main
from lit_klrb.distributed import check_strategy
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.loading import load_model, load_tokenizer
from lit_klrb.run.checkpoints import digest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
SHARDED = (*TWO[:3], "fsdp2")
SIZES = (schema.PROCESSES, schema.STEP_ROWS)
BATCH = {"rloo": 4, "dpo": 4, "distill": 4, "sft": 8, "reward": 8}
# In each line of torch 2.9 on connections, also where two processes write into one another
GLOO = ("[Gloo]", "peer ranks")
# Two steps
SHORT = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--model.schedule", "constant")
SHORT += ("--model.warmup_steps", "0")
# Of the second batch of an evaluation, one process has none
PROMPTS = ("--data.eval_size", "5", "--data.eval_batch_size", "4")
TEACHES = ("--kl.estimator", "replication.to_come.RaoBlackwellTokenValues")
LORA = ("--model.lora", "{r: 2, init_lora_weights: true}")
# The policy without its adapter is the reference
OFF = (*LORA, "--model.reference_path", "null", "--model.policy_path")
KEEPER = "--trainer.callbacks+=cli_keeper.GradientKeeper"


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
        kept = ("--trainer.callbacks.dirpath", str(root / f"{name}_kept"))
        fit(chain, "rloo", root / name, *options, *kept, *more)
    return SimpleNamespace(root=root, options=options)


def metrics(run):
    return {(row["step"], k): float(v) for row in rows_of(run) for k, v in row.items() if v and k != "epoch"}


def check_same(one, two):
    """Gradients and metrics of two processes are those of one."""
    for step in range(2):
        first, second = (torch.load(run / f"gradients_{step}.pt") for run in (one, two))
        assert first.keys() == second.keys()
        assert max(gradient.abs().max() for gradient in first.values()) > 1e-3, one
        for key, gradient in first.items():
            assert torch.allclose(second[key], gradient, rtol=1e-4, atol=2e-6), (two, step, key)
    first, second = metrics(one), metrics(two)
    assert first.keys() == second.keys()
    for key, value in first.items():
        # Before the first step there is rounding alone
        near = {"rel": 1e-2, "abs": 1e-3} if key[0] != "0" else {"rel": 1e-5, "abs": 1e-6}
        assert second[key] == pytest.approx(value, **near, nan_ok=True), (two, key)
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
    options += ("--trainer.precision", "64-true")  # the losses at the start nearly cancel
    for name, more in {"one": (), "two": ("--data.batch_size", "2", *TWO)}.items():
        fit(chain, "rloo", tmp_path / name, *options, *more)
    check_same(tmp_path / "one", tmp_path / "two")
    assert metrics(tmp_path / "two")["0", "train/reward_se"] > 1


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_two_processes_equal_one(rloo, name):
    one, two = rloo.root / "one", rloo.root / name
    check_same(one, two)
    sizes = [[json.loads((run / "summary.json").read_text())[key] for key in SIZES] for run in (one, two)]
    assert sizes == [[1, 4], [2, 4]]
    assert "training in 2 processes, 4 rows per step: 2 in each\n" in two.with_suffix(".log").read_text()
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


@pytest.fixture(scope="module")
def folder(chain, tmp_path_factory):
    """An exported policy."""
    folder = str(tmp_path_factory.mktemp("exported") / "sft")
    assert main(["export", "--ckpt_path", chain.checkpoint("sft"), "--output_dir", folder]) == 0
    return folder


def test_the_first_process_alone_reads_the_weights_of_a_sharded_model(chain, folder, tmp_path, monkeypatch):
    reads = tmp_path / "reads"

    def noted(read, *args, **settings):
        with reads.open("a") as file:
            print(os.environ["LOCAL_RANK"], read.__name__, file=file)
        return read(*args, **settings)

    for name in ("read_folder", "read_checkpoint"):
        monkeypatch.setattr(loading, name, partial(noted, getattr(loading, name)))
    models = ("--model.reference_path", folder, "--kl.estimator", "RaoBlackwellControlVariate")
    fit(chain, "rloo", tmp_path / "run", *SHORT, *models, "--data.batch_size", "2", *SHARDED)
    # Of the warm start the model and the tokenizer, and after the reference the token values
    first, *others = reads.read_text().splitlines()
    assert (first, others) == ("0 read_checkpoint", [first, "0 read_folder", first])


def test_what_the_first_process_cannot_load_ends_all_with_its_line(chain, folder, tmp_path):
    empty, log = shutil.copytree(folder, tmp_path / "empty"), tmp_path / "log"
    (empty / "model.safetensors").unlink()
    options = (*SHARDED, "--model.reference_path", str(empty))
    argv = chain.commands.argv("fit", "rloo", *options, run=tmp_path / "run")
    assert exit_codes(2, main, argv, log) == [2, 2]
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert "model.init_args.reference_path" in line
    assert "no file named model.safetensors" in line


def run_all(argvs):
    """0 if each command ends with code 0."""
    return max(map(main, argvs))


def test_two_processes_equal_one_in_each_cell_of_the_table(chain, tmp_path, monkeypatch):
    sft = chain.checkpoint("sft")
    teacher = load_model("reference_path", sft).eval()
    tokenizer = load_tokenizer("reference_path", sft)
    with TeacherServer(teacher, lambda token: tokenizer.decode([token])) as server:
        student = ("--model.policy_config", "null", "--model.policy_path", chain.checkpoint("rloo"))
        cells = {
            "sft": ("sft",),
            "reward": ("reward",),
            "dpo": ("dpo", *PROMPTS),
            "distill": ("distill", *PROMPTS, *TEACHES),
            "sft_lora": ("sft", "--model.policy_config", "null", "--model.policy_path", sft, *LORA),
            "dpo_lora": ("dpo", *PROMPTS, *OFF, sft),
            "rloo_lora": ("rloo", *PROMPTS, *OFF, sft),
            "distill_lora": ("distill", *PROMPTS, *student, *LORA),
            "served": ("distill", *PROMPTS, *student, "--model.reference_path", server.address),
            "moving": (
                "rloo",
                *PROMPTS,
                "--model.inner_epochs",
                "1",
                "--model.reference_update",
                "{decay: 0.5}",
            ),
        }
        cells["served"] += ("--kl.estimator", "RaoBlackwellTopK", "--kl.estimator.support", "reference")

        def argv(name, kind, *extra):
            stage, *options = cells[name]
            return chain.commands.argv(
                "fit", stage, *SHORT, *options, *extra, KEEPER, run=tmp_path / kind / name
            )

        monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path / "cache"))
        in_processes(1, run_all, [argv(name, "one") for name in cells], tmp_path / "one.log")
        # Nor does it find the pairs there
        monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path / "cache of two"))
        half = {name: ("--data.batch_size", str(BATCH[cells[name][0]] // 2)) for name in cells}
        two = [("ddp", name, TWO) for name in cells]
        two += [("sharded", name, SHARDED) for name in cells if name not in ("served", "moving")]
        # What DDP has trained for a step goes on under FSDP2
        resumed = {"rloo_lora": (SHARDED, 1e-6), "moving": (TWO, 0)}
        for name, (strategy, _) in resumed.items():
            saved = tmp_path / "ddp" / name / "checkpoints" / "previous.ckpt"
            two += [("resumed", name, (*strategy, "--ckpt_path", str(saved)))]
        always = dict.fromkeys(resumed, ("--checkpoint.every_n_train_steps", "1"))
        argvs = [argv(n, kind, *half[n], *always.get(n, ()), *options) for kind, n, options in two]
        in_processes(2, run_all, argvs, tmp_path / "two.log")
    for name, (_, near) in resumed.items():
        two.pop()
        assert not (tmp_path / "resumed" / name / "gradients_0.pt").exists()
        first, second = (weights_of(tmp_path / kind / name) for kind in ("ddp", "resumed"))
        assert first.keys() == second.keys()
        for key, weight in first.items():
            torch.testing.assert_close(second[key], weight, rtol=0, atol=near)
    for kind, name, _ in two:
        check_same(tmp_path / "one" / name, tmp_path / kind / name)


@pytest.mark.slow  # two interpreters load all libraries
def test_one_command_starts_both_processes(chain, tmp_path):
    argv = chain.commands.argv("fit", "rloo", "--data.batch_size", "2", *TWO, KEEPER, run=tmp_path / "run")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT)))}
    command = [sys.executable, "-m", "lit_klrb", *argv]
    subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300)
    assert [(tmp_path / "run" / f"rollout_0_{rank}.pt").exists() for rank in range(2)] == [True, True]


def lines_without(log, *others):
    """The lines of a log that contain none of these texts."""
    return [line for line in log.read_text().splitlines() if not any(text in line for text in others)]


class KillOne(Callback):
    """Kills a process at a step."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_before_optimizer_step(self, trainer, *_):
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other_with_one_line(chain, tmp_path, monkeypatch, killed):
    log = tmp_path / "log"
    argv = chain.commands.argv(
        *("fit", "sft", "--data.batch_size", "4", *TWO, "--checkpoint.every_n_train_steps", "1"),
        run=tmp_path / "run",
    )
    with monkeypatch.context() as patched:
        with_callback(patched, KillOne(killed, step=3))
        codes = exit_codes(2, main, argv, log)
    assert (codes[killed], codes[1 - killed]) == (-signal.SIGKILL, 1), log.read_text()
    (line,) = lines_without(log, "training in 2 processes", "weights: ", "step ", *GLOO)
    assert line.startswith("error: another process of this run has ended, or does not answer; to resume: ")
    in_processes(2, main, resume_command(line), log)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("strategy", [FSDPStrategy(), ModelParallelStrategy()])
def test_other_strategies_are_refused(strategy):
    message = f"trainer.strategy: {type(strategy).__name__} is not supported; use ddp, one device, or fsdp2"
    with pytest.raises(ConfigurationError, match=message):
        check_strategy(SimpleNamespace(strategy=strategy))


def fails_unless_refused(argvs):
    """0 if each command ends with code 2. It is forked, as the first one starts a group of one process."""
    return {main(argv) for argv in argvs} != {2}


def test_what_needs_whole_models_is_refused_with_sharded_ones(chain, tmp_path):
    one = SHARDED[2:]
    refused = {
        (
            *("rloo", "--model.inner_epochs", "1", "--model.reference_path", "policy"),
        ): "error: model.init_args.reference_path: 'policy' is not supported by fsdp2",
        ("rloo", "--trainer.callbacks+=GradientNoiseStudy"): "error: trainer.callbacks: GradientNoiseS",
    }
    argvs = [
        chain.commands.argv("fit", stage, *one, *options, run=tmp_path / "run") for stage, *options in refused
    ]
    log = tmp_path / "log"
    with Child(fails_unless_refused, argvs, log, {}) as child:
        assert child.wait() == 0, log.read_text()
    errors = lines_without(log, "kept", "is back", *GLOO)
    assert len(errors) == len(refused), errors
    for error, message in zip(errors, refused.values(), strict=True):
        assert re.match(message, error)


# A run is resumed as it was, or with DDP where it was sharded: whose sums are rounded differently
@pytest.mark.parametrize(
    ("kind", "strategy", "near"), [("two", TWO, 0), ("sharded", SHARDED, 0), ("sharded", TWO, 1e-6)]
)
def test_two_processes_resume_exactly_within_a_rollout(chain, rloo, tmp_path, kind, strategy, near):
    straight, kept, resumed = rloo.root / kind, rloo.root / f"{kind}_kept", tmp_path / "run"
    options = ("--trainer.callbacks.dirpath", str(kept), "--data.batch_size", "2")
    resume = ("--ckpt_path", str(kept / "step=3.ckpt"))
    fit(chain, "rloo", resumed, *rloo.options, *options, *strategy, *resume)
    assert [(resumed / f"gradients_{step}.pt").exists() for step in (2, 3)] == [False, True]
    first, second = weights_of(straight), weights_of(resumed)
    assert first.keys() == second.keys()
    for key, weight in first.items():
        torch.testing.assert_close(second[key], weight, rtol=0, atol=near)


def test_a_sharded_run_is_not_resumed_by_one_process(chain, rloo, tmp_path, capsys):
    saved = ("--ckpt_path", str(rloo.root / "sharded_kept" / "step=3.ckpt"))
    options = (*rloo.options, "--data.batch_size", "2", KEEPER, *saved)
    assert chain.commands.run("fit", "rloo", *options, run=tmp_path / "run") == 2
    assert "2 processes, but trainer.devices gives 1; resume with the same number" in capsys.readouterr().err
