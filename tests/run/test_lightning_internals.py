import signal
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import lightning as L
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.loggers import mlflow, wandb

from benchmarks.kills.children import Child
from lit_klrb.run import lightning_internals
from lit_klrb.run.lightning_internals import (
    count_completed_batches,
    name_run,
    say_before_kill,
    set_logged_epoch,
    set_logged_step,
    trainer_of,
)


def test_a_module_knows_its_trainer_once_it_is_attached():
    module = L.LightningModule()
    assert trainer_of(module) is None
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert trainer_of(module) is module.trainer


def test_the_logged_step_is_what_the_loggers_are_given():
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    set_logged_step(trainer, 7)
    assert trainer._logger_connector.trainer.fit_loop.epoch_loop._batches_that_stepped == 7


def test_the_logged_epoch_is_that_of_the_last_step():
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    epochs = trainer.fit_loop.epoch_progress.current
    for ended in (2, 3):
        epochs.ready, epochs.completed = 3, ended
        set_logged_epoch(trainer)
        assert trainer.current_epoch == 2


def test_a_batch_that_has_begun_is_not_counted():
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    progress = trainer.fit_loop.epoch_loop.batch_progress
    progress.total.ready, progress.total.completed = 4, 3
    checkpoint = {"loops": {"fit_loop": trainer.fit_loop.state_dict()}}
    count_completed_batches(checkpoint)
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    assert progress.total.ready == 3


def test_runs_of_mlflow_have_a_name_and_files_of_wandb_a_folder_unless_the_configuration_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda uri: None))
    monkeypatch.setattr(mlflow, "_MLFLOW_AVAILABLE", True)
    monkeypatch.setattr(wandb, "_WANDB_AVAILABLE", True)
    for own, expected in ((None, "mine 1f"), ("theirs", "theirs")):
        logger = mlflow.MLFlowLogger(run_name=own)
        name_run(logger, "mine 1f", "runs/mine")
        assert logger._run_name == expected
    for own, expected in ((".", "runs/mine"), ("elsewhere", "elsewhere")):
        logger = wandb.WandbLogger(save_dir=own)
        name_run(logger, "mine 1f", "runs/mine")
        assert logger._wandb_init["dir"] == logger.save_dir == expected


def hang_beside_a_failed_process(_):
    lightning_internals._GRACE = 0.01
    say_before_kill(lambda: "error: it has ended")
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    subprocess_script._ChildProcessObserver.__init__.__defaults__ = (0.01,)
    subprocess_script._launch_process_observer([failed])
    time.sleep(60)


def test_before_lightning_kills_a_process_that_waits_for_a_failed_one_a_line_says_why(tmp_path):
    with Child(hang_beside_a_failed_process, [], tmp_path / "log", {}) as child:
        assert child.wait(30) == -signal.SIGKILL
    assert child.last_line == "error: it has ended"
