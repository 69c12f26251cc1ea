"""All that this package reads or writes of Lightning's private state, in one place.

A new release of Lightning may change any of it; `tests/run/test_lightning_internals.py` says which.
"""

from typing import Any

import lightning as L


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The trainer that a module is attached to, or None, as for `load_from_checkpoint`."""
    return module._trainer


def set_logged_step(trainer: L.Trainer, step: int) -> None:
    """Set the step that loggers are given, which Lightning counts apart from the optimizer's."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def count_completed_batches(checkpoint: dict[str, Any]) -> None:
    """In a checkpoint saved as a batch begins, count only the batches before it.

    Lightning schedules the next evaluation by the batches it has begun.
    """
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    batches["ready"] = batches["completed"]
