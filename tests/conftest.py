"""Tiny runs of all stages, made once per worker with the command line."""

import gc
import io
import os
from contextlib import redirect_stdout
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

# Where the runs of these tests train: cpu, or gpu with this variable
ACCELERATOR = os.environ.get("LIT_KLRB_TEST_ACCELERATOR", "cpu")
if ACCELERATOR == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process cannot be forked once it has used a GPU

# A test's process may have started a server of imports, which is not that of a process forked from it
os.register_at_fork(after_in_child=forkserver._forkserver.__init__)

CONFIGS = Path(__file__).parents[1] / "configs" / "demo"
TINY = {
    "sft": [
        *("--model.policy_config.n_embd", "16", "--model.policy_config.n_layer", "1"),
        *("--data.train_size", "64", "--data.eval_size", "16", "--data.batch_size", "8"),
        *("--trainer.max_steps", "6", "--trainer.val_check_interval", "6"),
    ],
    "dpo": [
        *("--data.train_size", "32", "--data.eval_size", "8", "--data.batch_size", "4"),
        *("--model.max_new_tokens", "8", "--trainer.max_steps", "4", "--trainer.val_check_interval", "2"),
    ],
    "rloo": [
        *("--data.train_size", "32", "--data.eval_size", "8", "--data.batch_size", "4"),
        *("--model.max_new_tokens", "8", "--trainer.max_steps", "6", "--trainer.val_check_interval", "3"),
    ],
    "reward": [
        *("--model.classifier_config.n_embd", "16", "--model.classifier_config.n_layer", "1"),
        *("--data.train_size", "64", "--data.eval_size", "16", "--data.batch_size", "8"),
        *("--trainer.max_steps", "6", "--trainer.val_check_interval", "3"),
    ],
    "distill": [
        *("--model.policy_config.n_embd", "8", "--data.train_size", "32", "--data.eval_size", "8"),
        *("--data.batch_size", "4", "--model.max_new_tokens", "8"),
        *("--trainer.max_steps", "4", "--trainer.val_check_interval", "2"),
    ],
}
CHAIN = ("sft", "dpo", "rloo", "reward")


def pytest_collection_finish():
    """Keep the libraries out of searches for garbage, which each Holm correction of statsmodels starts."""
    gc.freeze()


def pytest_sessionfinish():
    """Let the interpreter free them at its end; nanobind reports what is left."""
    gc.unfreeze()


class Commands:
    """The command line in this process, with tiny settings instead of the demo's."""

    def __init__(self, root):
        self.root = root

    def checkpoint(self, stage):
        return str(self.root / stage / "checkpoints" / "last.ckpt")

    def argv(self, command, stage, *extra, run=None):
        upstream = []
        if stage not in ("sft", "reward"):
            upstream = ["--model.reference_path", self.checkpoint("sft")]
        if stage == "rloo":
            upstream += ["--model.policy_path", self.checkpoint("dpo")]
        where = ["--trainer.default_root_dir", str(run or self.root / stage)]
        where += ["--trainer.enable_progress_bar", "false"]
        device = [] if ACCELERATOR == "cpu" else ["--trainer.accelerator", ACCELERATOR]
        config = ["--config", str(CONFIGS / f"{stage}.yaml")]
        return [command, *config, *TINY[stage], *upstream, *where, *device, *extra]

    def run(self, command, stage, *extra, run=None):
        from lit_klrb.cli.main import main

        return main(self.argv(command, stage, *extra, run=run))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A separate cache for the tests and their subprocesses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_KLRB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Only the descriptor is checked: durability shows after a power failure alone, and no test has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture
def plans_checked_here(monkeypatch):
    """The arms of a plan are checked in this process, which has the libraries loaded."""
    from analysis.design import examination
    from lit_klrb.cli.main import main

    def run(command, *, input, **_):
        assert command[1:] == ["-m", "lit_klrb", "check"]
        with monkeypatch.context() as patched, redirect_stdout(io.StringIO()) as said:
            patched.setattr("sys.stdin", io.StringIO(input))
            assert main(["check"]) == 0
        return SimpleNamespace(stdout=said.getvalue(), stderr="")

    monkeypatch.setattr(examination, "subprocess", SimpleNamespace(run=run))


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    """Run directories sft, dpo, rloo and reward under `root`, and the commands that made them."""
    root = tmp_path_factory.mktemp("chain")
    commands = Commands(root)
    for stage in CHAIN:
        assert commands.run("fit", stage) == 0
    return SimpleNamespace(root=root, commands=commands, run=commands.run, checkpoint=commands.checkpoint)
