"""All accesses to Lightning's private state.

A new release of Lightning may break them, which `tests/run/test_lightning_internals.py` detects.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import TrainerFn

# How Lightning ends the first process and those that it started when one of these has failed, and for how
# many seconds the first may see and explain that itself.
_KILL, _GRACE = _ChildProcessObserver._terminate_all, 5.0


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The trainer of a module; None without one, as in `load_from_checkpoint`."""
    return module._trainer


def keep_float32(trainer: L.Trainer) -> None:
    """Leave what bf16-true and 16-true convert beside weights, which `set_dtypes` converts, in float32.

    Those are buffers, such as the frequencies of positions, inputs, such as log-probabilities of DPO's
    reference, and new tensors, such as rewards.
    """
    if isinstance(trainer.precision_plugin, HalfPrecision):
        for name in ("convert_module", "convert_input", "forward_context", "module_init_context"):
            setattr(trainer.precision_plugin, name, getattr(Precision(), name))


def attach(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule) -> None:
    """Connect a module and its data with a trainer, as `Trainer.fit` does before anything else."""
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=data)
    _verify_loop_configurations(trainer)


def name_run(logger: Logger, name: str, folder: str) -> None:
    """Give MLflow's run a name and W&B's files a folder, where the configuration has none.

    MLflow would draw a name, the same one for each run with a seed, and W&B write to the working directory.
    """
    if isinstance(logger, MLFlowLogger) and logger._run_name is None:
        logger._run_name = name
    if isinstance(logger, WandbLogger) and logger._wandb_init["dir"] in (None, "."):
        logger._wandb_init["dir"] = logger._save_dir = folder


def set_logged_step(trainer: L.Trainer, step: int) -> None:
    """Set the step of the loggers, which Lightning counts separately from the optimizer's."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def set_logged_epoch(trainer: L.Trainer) -> None:
    """Set the epoch of the loggers to that of the last step, which Lightning ends before the fit returns."""
    epochs = trainer.fit_loop.epoch_progress.current
    epochs.completed = min(epochs.completed, epochs.ready - 1)


def count_completed_batches(checkpoint: dict[str, Any]) -> None:
    """Exclude the current batch from the counts of a checkpoint that is saved when the batch starts.

    Lightning schedules the next evaluation by the number of started batches.
    """
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    batches["ready"] = batches["completed"]


def say_before_kill(line: Callable[[], str]) -> None:
    """Print a line before Lightning kills this process, as one that it started has failed.

    A process that computes for long, or waits for the lost one on a GPU, does not see that itself.
    """

    def said(observer: _ChildProcessObserver) -> None:
        time.sleep(_GRACE)
        print(line(), file=sys.stderr, flush=True)
        _KILL(observer)

    _ChildProcessObserver._terminate_all = said  # type: ignore[assignment, method-assign]
