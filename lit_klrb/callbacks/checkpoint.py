"""When a run's checkpoint is written: at the start of a step, when everything before it is on disk."""

from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_klrb.run.lightning_internals import count_completed_batches
from lit_klrb.run.loggers import MetricsLogger

# How much of a run a kill may lose, unless it is said otherwise.
INTERVAL = timedelta(minutes=1)


class RunCheckpoint(ModelCheckpoint):
    """Saves a checkpoint every minute, or every so many steps, at the start of a step.

    By then the metrics of the step before are logged, and the evaluation that was due is done. Lightning
    saves before both: a run stopped soon after, and resumed, would never log them.

    Args:
        every_n_train_steps: Optimizer steps between two checkpoints.
        train_time_interval: Time between two checkpoints, such as 0:05:00; a minute unless another rhythm is
            given.
        kwargs: See Lightning's `ModelCheckpoint`.
    """

    def __init__(
        self,
        *,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        if not (every_n_train_steps or train_time_interval or kwargs.get("every_n_epochs")):
            train_time_interval = INTERVAL
        super().__init__(
            every_n_train_steps=every_n_train_steps, train_time_interval=train_time_interval, **kwargs
        )

    @property
    def state_key(self) -> str:
        """What tells two of them apart. Their rhythm does not: a resumed run may have another."""
        return self._generate_state_key(filename=self.filename, monitor=self.monitor, mode=self.mode)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save, where a checkpoint is due; never between the parts of an optimizer step."""
        if between_steps(trainer, batch_idx):
            super().on_train_batch_end(trainer, pl_module, {}, batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        """Wait for the next step to begin."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush the loggers, since a resumed run does not log these steps again."""
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, MetricsLogger):
                logger.sync()
        count_completed_batches(checkpoint)


def between_steps(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether the batch about to begin is the first of an optimizer step: only then can a run be resumed."""
    return batch_idx % trainer.accumulate_grad_batches == 0
