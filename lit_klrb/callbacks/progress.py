"""The progress bar, with the numbers that matter and no others."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class RunProgressBar(RichProgressBar):
    """Steps instead of epochs: training data are endless here, so that an epoch means nothing."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The metrics the module asked for, without the logger's version."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{'Training':{len(self.validation_description)}}"
