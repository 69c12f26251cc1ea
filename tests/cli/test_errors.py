"""Wrong input ends with exit code 2 and one line that names the key, the value and what is allowed."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from runs import one_line_of

import lit_klrb
from lit_klrb.cli.main import main


def test_a_missing_checkpoint_names_the_command_that_makes_it(capsys, tmp_path, monkeypatch):
    configs = tmp_path / "configs" / "demo"
    configs.mkdir(parents=True)
    for stage in ("sft", "dpo", "rloo"):
        source = f"configs/demo/{stage}.yaml"
        (configs / f"{stage}.yaml").write_text(Path(source).read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "configs/demo/rloo.yaml"]) == 2
    assert one_line_of(capsys) == (
        "error: model.init_args.policy_path: runs/demo/dpo/checkpoints/last.ckpt does not exist; "
        "make it with: lit-klrb fit --config configs/demo/dpo.yaml"
    )
    assert not (tmp_path / "runs").exists()


def test_the_programs_help_lists_its_commands(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    names = ("fit", "validate", "test", "predict", "check", "explain", "export", "kl")
    assert all(f"\n  {name} " in output for name in names)


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit_klrb {lit_klrb.__version__}\n"


USER_CODE = """
from dataclasses import dataclass
import lightning as L
from lit_klrb.estimators import MonteCarlo

def fail(*args, **kwargs):
    raise RuntimeError("no luck")

class Callback(L.Callback):
    on_train_start = fail

class Module(L.LightningModule):
    __init__ = fail

@dataclass(frozen=True, kw_only=True)
class Estimator(MonteCarlo):
    weights = fail
"""


def test_an_exception_in_user_code_is_one_line_that_says_where(chain, capsys, monkeypatch, tmp_path):
    (tmp_path / "user_code.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    root = ["--trainer.default_root_dir", str(tmp_path / "run"), "--trainer.max_steps", "1"]
    for argv in (
        chain.commands.argv("fit", "rloo", "--trainer.callbacks+=user_code.Callback", *root),
        chain.commands.argv("fit", "rloo", "--kl.estimator", "user_code.Estimator", *root),
        ["fit", "--model", "user_code.Module", "--data", "PromptDataModule", *root],
    ):
        assert main(argv) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ")
        assert re.search(r"RuntimeError: no luck \(.*user_code\.py, line 7\)", line)


@pytest.mark.parametrize("argv", [["explain"], ["fit", "--help"]])
def test_a_reader_that_stops_early_ends_a_command_quietly(argv):
    command = [sys.executable, "-m", "lit_klrb", *argv]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_one_training_batch_is_not_all_of_them_whatever_typing_saw_before(capsys, monkeypatch):
    """typing treats Union[float, int] and Union[int, float] as equal; Lightning uses both."""
    annotations = inspect.unwrap(L.Trainer.__init__).__annotations__
    assert annotations["limit_train_batches"] == float | int | None
    monkeypatch.setitem(annotations, "limit_train_batches", float | int | None)
    config = str(Path(lit_klrb.__file__).parents[1] / "configs" / "demo" / "rloo.yaml")
    assert main(["fit", "--config", config, "--trainer.limit_train_batches", "1"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: trainer.limit_train_batches: must be null or 1.0")
    assert line.endswith("got 1")


def test_a_configuration_that_the_disk_does_not_give_is_named(capsys):
    assert main(["fit", "--config", "/proc/self/mem"]) == 1
    assert one_line_of(capsys) == "error: /proc/self/mem: Input/output error"
