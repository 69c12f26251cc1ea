"""Stopping a fit between two steps when Ctrl-C or SIGTERM asks for it."""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_klrb.callbacks.checkpoint import between_steps
from lit_klrb.stops import Stopped, Stops


class StopBetweenSteps(L.Callback):
    """Saves a checkpoint at the start of the step after the signal, and raises `Stopped`.

    An evaluation that is due is finished first. In several processes one signal stops all.

    Args:
        checkpoint: The file to save; None saves nothing.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self._stops = Stops(later="stopping after this step; once more to stop at once, without saving")
        self._began_at = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the signal handlers."""
        self._began_at = trainer.global_step
        self._stops.__enter__()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop if a signal was received."""
        if between_steps(trainer, batch_idx):
            self._stop_if_asked(trainer, save=trainer.global_step > self._began_at)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop before the final evaluation, which a resumed run repeats; from here on, at once."""
        self._stop_if_asked(trainer, save=False)
        self._stops.__exit__(None, None, None)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Restore the previous signal handlers."""
        self._stops.__exit__(None, None, None)

    def _stop_if_asked(self, trainer: L.Trainer, save: bool) -> None:
        number = self._stops.asked or 0
        if trainer.world_size > 1:
            asked = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(asked, reduce_op="max"))
        if number:
            if save and self.checkpoint is not None:
                trainer.save_checkpoint(self.checkpoint)
            raise Stopped(number)
