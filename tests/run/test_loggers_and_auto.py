"""Loggers hear of the whole run and change no id; `--ckpt_path auto` continues what is the same run."""

import json
import os
from typing import ClassVar

import pytest
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from analysis.design.fingerprint import read_config, semantic
from lit_klrb.cli.main import main
from lit_klrb.modules import SFTModule


class Listener(Logger):
    told: ClassVar[dict] = {}

    def __init__(self, api_key=None, url=None):
        super().__init__()
        self.given = api_key, url

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


class Pusher(Callback):
    def __init__(self, note, auth_token):
        self.note, self.auth_token = note, auth_token


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


def test_no_file_has_a_key_or_a_value_of_the_environment(chain, tmp_path, monkeypatch, capsys):
    """Neither configuration, checkpoints, events nor other loggers; a resumed run reads them again."""
    Listener.told.clear()
    hidden = {"OWN_KEY": "f00dfeed", "OWN_URL": "http://me:pass@host", "OWN_RATE": "0.00123"}
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    options = {"note": "${oc.env:OWN_URL}", "auth_token": "t0ken-of-mine"}
    init_args = {"api_key": "literal-k3y", "url": "${trainer.callbacks[0].init_args.note}"}
    content = {
        "trainer": {
            "logger": [{"class_path": f"{__name__}.Listener", "init_args": init_args}],
            "callbacks": [{"class_path": f"{__name__}.Pusher", "init_args": options}],
        },
        "model": {"class_path": "SFTModule", "init_args": {"learning_rate": "${oc.env:OWN_RATE}"}},
    }
    path, run = tmp_path / "own.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(content))
    few = ["--trainer.max_steps", "2", "--trainer.logger+=TensorBoardLogger"]
    few += ["--trainer.logger.save_dir", str(run / "board")]
    assert chain.run("fit", "sft", "--config", str(path), *few, run=run) == 0
    values = [*hidden.values(), "literal-k3y", "t0ken-of-mine"]
    files = [file for file in run.rglob("*") if file.is_file()]
    assert {"config.yaml", "last.ckpt", "metrics.csv"} < {file.name for file in files}
    events = [file for file in files if file.name.startswith("events.")]
    assert {file.relative_to(run).parts[0] for file in events} == {"tensorboard", "board"}
    assert [(f.name, v) for f in files for v in values if v.encode() in f.read_bytes()] == []
    assert Listener.told["model.init_args.learning_rate"] == "${oc.env:OWN_RATE}"
    assert Listener.told["trainer.callbacks.0.init_args.auth_token"] == "***"
    assert not [key for key in Listener.told if "logger" in key]
    # Resuming needs what is not written, and notices where it has changed
    again = ["fit", "--config", str(run / "config.yaml")]
    again += ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    assert main(again) == 2
    assert "api_key: *** stands for a value that is not written; set it" in capsys.readouterr().err
    pusher = {"class_path": f"{__name__}.Pusher", "init_args": options | {"note": hidden["OWN_URL"]}}
    again += ["--trainer.callbacks", json.dumps([pusher]), "--trainer.logger", "false"]
    monkeypatch.setenv("OWN_RATE", "0.00124")
    assert main(again) == 2
    assert "was trained with ${oc.env:OWN_RATE}, of another value" in capsys.readouterr().err
    monkeypatch.setenv("OWN_RATE", "0.00123")
    assert main(again) == 0


def test_a_second_tensorboard_is_configured_by_its_own_arguments(chain, tmp_path, capsys):
    """Its base class needs root_dir, which it gives itself."""
    logger = ["--trainer.max_steps", "2", "--trainer.logger", "TensorBoardLogger"]
    assert chain.run("fit", "sft", *logger, run=tmp_path / "run") == 2
    assert "TensorBoardLogger needs save_dir: add" in capsys.readouterr().err
    own = ["--trainer.logger.save_dir", str(tmp_path / "board")]
    assert chain.run("fit", "sft", *logger, *own, run=tmp_path / "run") == 0
    assert [*(tmp_path / "board").rglob("events.out.tfevents.*")]


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
