"""A flipped bit in the weights of a checkpoint is detected by all readers."""

import json
import shutil

import pytest
import torch
from lightning import Trainer
from runs import weights_of

from lit_klrb.cli.lightning import quiet
from lit_klrb.cli.main import main
from lit_klrb.data.modules import TextDataModule
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import load_model
from lit_klrb.modules import RewardModule, RLOOModule, SFTModule
from lit_klrb.run.checkpoints import digest


@pytest.fixture(scope="module")
def damaged(chain, tmp_path_factory):
    """Checkpoints with a flipped bit in a weight."""

    def damage(stage):
        path = tmp_path_factory.mktemp(stage) / f"{stage}.ckpt"
        weight = next(iter(weights_of(chain.root / stage).values())).numpy().tobytes()
        raw = bytearray((chain.root / stage / "checkpoints" / "last.ckpt").read_bytes())
        raw[raw.index(weight) + len(weight) // 2] ^= 1
        path.write_bytes(raw)
        return str(path)

    return {stage: damage(stage) for stage in ("sft", "rloo", "reward")}


@pytest.mark.parametrize(("kind", "stage"), [(RLOOModule, "rloo"), (RewardModule, "reward")])
def test_by_python(damaged, kind, stage):
    path = damaged[stage]
    with pytest.raises(ConfigurationError) as refusal:
        kind.load_from_checkpoint(path)
    assert str(refusal.value).startswith(f"checkpoint_path: {path}: damaged: ")
    assert str(refusal.value).endswith(" does not match its checksum")


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_by_a_trainer_of_ones_own(chain, damaged, tmp_path, command):
    module = SFTModule(policy_path=chain.checkpoint("sft"))
    data = TextDataModule(batch_size=8, train_size=16, eval_size=8)
    quiet()
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    rhythm = {"max_steps": 8, "val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = Trainer(**options, **rhythm, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError) as refusal:
        getattr(trainer, command)(module, datamodule=data, ckpt_path=damaged["sft"])
    assert str(refusal.value).startswith(f"ckpt_path: {damaged['sft']}: damaged: ")
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("command", "key", "stage"),
    [
        ("fit", "model.policy_path", "rloo"),
        ("fit", "model.reference_path", "sft"),
        ("fit", "model.reward_path", "reward"),
        ("fit", "ckpt_path", "rloo"),
        ("validate", "ckpt_path", "rloo"),
    ],
)
def test_by_a_run(chain, damaged, tmp_path, capsys, command, key, stage):
    assert chain.run(command, "rloo", f"--{key}", damaged[stage], run=tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = key.rpartition(".")[2]
    assert f"{name}: {damaged[stage]}: damaged: " in line
    assert not (tmp_path / "run").exists()


def test_by_an_export(damaged, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", "--ckpt_path", damaged["rloo"], "--output_dir", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: ckpt_path: {damaged['rloo']}: damaged: ")
    assert not out.exists()


@pytest.fixture
def published(chain, tmp_path):
    """A published cell of a sweep with the checkpoint of the reference, and its result."""
    cell, result = tmp_path / "cells" / "01", tmp_path / "results" / "01.json"
    for folder in (cell / "checkpoints", result.parent):
        folder.mkdir(parents=True)
    shutil.copy(chain.checkpoint("sft"), cell / "checkpoints" / "last.ckpt")
    return cell / "checkpoints" / "last.ckpt", result


def test_other_weights_than_the_published_ones_are_refused(chain, published, tmp_path, capsys):
    path, result = published
    summary = json.loads((chain.root / "sft" / "summary.json").read_text())
    (tmp_path / "sft").symlink_to(path.parents[1])
    link = tmp_path / "sft" / "checkpoints" / "last.ckpt"
    for content in (summary, {"state": "done"}):  # results of earlier versions have no digest
        result.write_text(json.dumps(content))
        assert load_model("policy_path", str(link)).config.model_type == "gpt2"

    content = torch.load(path, weights_only=True)
    next(iter(content["state_dict"].values()))[0, 0] += 1e-3
    torch.save(content, path)
    result.write_text(json.dumps(summary))
    for key in ("policy_path", "reference_path"):
        assert chain.run("fit", "rloo", f"--model.{key}", str(link), run=tmp_path / "run") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"{key}: {link}: its weights are not those of its published result, {result}")
    shutil.copy(path, path.with_name("previous.ckpt"))
    load_model("policy_path", str(path.with_name("previous.ckpt")))


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, None])
def test_a_published_result_that_cannot_be_read(published, content):
    path, result = published
    result.mkdir() if content is None else result.write_text(content)
    message = f"^policy_path: {path}: its published result cannot be read: {result}$"
    with pytest.raises(ConfigurationError, match=message):
        load_model("policy_path", str(path))


def test_a_run_says_which_weights_it_ended_with(chain):
    for stage in ("sft", "rloo", "reward"):
        summary = json.loads((chain.root / stage / "summary.json").read_text())
        assert summary["weights_sha256"] == digest(weights_of(chain.root / stage))
