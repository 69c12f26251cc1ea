"""When a run's checkpoint is written: once everything before it is on disk."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class RunCheckpoint(ModelCheckpoint):
    """Saves a step's checkpoint when the next step begins, not within the step.

    By then the step's metrics are logged, and the evaluation that was due is done. Lightning's own moment is
    before both: a run stopped soon after it, and resumed, would never log them.
    """

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save, where a checkpoint is due."""
        super().on_train_batch_end(trainer, pl_module, {}, batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        """Wait for the next step to begin."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write what is logged, as a resumed run does not log it again; count only the steps that are done.

        Lightning places the next evaluation by the batches it has begun, and one has begun.
        """
        for logger in trainer.loggers:
            logger.save()
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        batches["ready"] = batches["completed"]
