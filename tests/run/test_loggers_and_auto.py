"""Loggers hear of the whole run and change no id; `--ckpt_path auto` continues what is the same run."""

import json
import os
from typing import ClassVar

import pytest
from lightning.pytorch.loggers import Logger

from analysis.design.fingerprint import read_config, semantic
from lit_klrb.modules import SFTModule


class Listener(Logger):
    told: ClassVar[dict] = {}

    @property
    def name(self):
        return "listener"

    @property
    def version(self):
        return 0

    def log_hyperparams(self, params, *_, **__):
        self.told.setdefault("id_of_wandb", os.environ.get("WANDB_RUN_ID"))
        self.told.update(params)

    def log_metrics(self, metrics, step=None):
        pass


def test_every_logger_gets_the_whole_configuration(chain, tmp_path):
    Listener.told.clear()
    own = ["--trainer.logger", f"{__name__}.Listener", "--kl.beta", "0.7"]
    assert chain.run("fit", "rloo", *own, "--trainer.max_steps", "2", run=tmp_path / "mine") == 0
    assert Listener.told["kl.estimator.class_path"].endswith("RaoBlackwellControlVariate")
    assert Listener.told["kl.beta"] == 0.7
    assert Listener.told["data.init_args.batch_size"] == 4
    assert Listener.told["trainer.max_steps"] == 2
    assert (Listener.told["run.name"], Listener.told["run.folder"]) == ("mine", str(tmp_path / "mine"))
    # The run's own, which a resumed run keeps; it is not left to the next run of this process
    assert Listener.told["id_of_wandb"] == json.loads((tmp_path / "mine" / "run.json").read_text())["run"]
    assert "WANDB_RUN_ID" not in os.environ


def test_a_logger_changes_no_id(tmp_path):
    path = tmp_path / "stage.yaml"
    path.write_text("trainer: {max_steps: 3, logger: {class_path: CSVLogger}}")
    assert semantic(read_config(str(path), {})) == {"trainer": {"max_steps": 3}}


def test_auto_continues_the_same_run_and_starts_every_other(chain, tmp_path, capsys, monkeypatch):
    steps, auto = [], ["--ckpt_path", "auto", "--checkpoint.every_n_train_steps", "1"]
    own = SFTModule.training_step

    def step(module, *arguments):
        steps.append(module.global_step)
        if len(steps) == 4:
            raise RuntimeError("a machine is taken away")
        return own(module, *arguments)

    monkeypatch.setattr(SFTModule, "training_step", step)
    with pytest.raises(RuntimeError, match="taken away"):
        chain.run("fit", "sft", *auto, run=tmp_path)
    assert "no checkpoint in" in capsys.readouterr().err
    assert chain.run("fit", "sft", *auto, run=tmp_path) == 0
    assert (steps, "auto: resuming" in capsys.readouterr().err) == ([0, 1, 2, 3, 3, 4, 5], True)
    assert chain.run("fit", "sft", *auto, "--seed_everything", "1", run=tmp_path) == 0
    assert (steps[7], "auto: another run starts" in capsys.readouterr().err) == (0, True)
