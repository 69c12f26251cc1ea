"""The progress bar of a run."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class RunProgressBar(RichProgressBar):
    """A progress bar that counts steps instead of epochs, as training data are infinite."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The metrics that modules log with `prog_bar`, without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{'Training':{len(self.validation_description)}}"
