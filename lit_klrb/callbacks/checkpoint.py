"""Checkpoints at the start of a step, when all earlier metrics are on disk, and stops on a signal there."""

import sys
import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_klrb.errors import ConfigurationError
from lit_klrb.run.lightning_internals import count_completed_batches
from lit_klrb.run.loggers import MetricsLogger
from lit_klrb.stops import WARNING, Stopped, Stops, lead_line

# The default interval between checkpoints: the maximum time of training that a kill loses; and the least one,
# as a multiple of the time that saving took.
INTERVAL, TIMES = timedelta(minutes=1), 20


class RunCheckpoint(ModelCheckpoint):
    """Saves a checkpoint every minute, or at another interval, at the start of a step.

    If saving takes more than three seconds, it is every twenty times that.

    At that point the metrics of the previous step are logged and its evaluation, if due, is complete.
    Lightning saves before both, so a run that is stopped then and resumed would never log them.

    Args:
        every_n_train_steps: Optimizer steps between checkpoints.
        train_time_interval: Time between checkpoints, such as 0:05:00; one minute unless another interval is
            given.
        kwargs: See Lightning's `ModelCheckpoint`.

    Raises:
        ConfigurationError: If `mode` is neither min nor max.
    """

    def __init__(
        self,
        *,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        if (mode := kwargs.get("mode", "min")) not in ("min", "max"):
            raise ConfigurationError(f"{mode!r} must be min or max", key="checkpoint.mode")
        self.seconds: float | None = None  # that the latest save took
        self._adapts = not (every_n_train_steps or train_time_interval or kwargs.get("every_n_epochs"))
        if self._adapts:
            train_time_interval = INTERVAL
        super().__init__(
            every_n_train_steps=every_n_train_steps, train_time_interval=train_time_interval, **kwargs
        )

    @property
    def state_key(self) -> str:
        """The key of the state. It excludes the interval, which may change when a run is resumed."""
        return self._generate_state_key(filename=self.filename, monitor=self.monitor, mode=self.mode)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save if a checkpoint is due; never between the accumulated batches of an optimizer step."""
        if not between_steps(trainer, batch_idx):
            return
        began = time.monotonic()
        super().on_train_batch_end(trainer, pl_module, {}, batch, batch_idx)
        if self._last_global_step_saved == trainer.global_step:
            self.seconds = time.monotonic() - began
            if self._adapts:
                self._train_time_interval = max(INTERVAL, TIMES * timedelta(seconds=self.seconds))

    def on_train_batch_end(self, *_: Any) -> None:
        """Do nothing; `on_train_batch_start` of the next step saves."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to monitor what no evaluation logs: before the first step, for all callbacks."""
        is_first, first = trainer.sanity_checking, getattr(pl_module, "first_metrics", set[str]())
        known: Collection[str] = first if is_first else trainer.callback_metrics
        # Of modules of others nothing is known before the first step
        others = trainer.callbacks if first else []  # type: ignore[attr-defined]
        for callback in others if is_first else [self]:
            name = getattr(callback, "monitor", None)
            if name is None or name in known or (is_first and str(name).startswith("train/")):
                continue
            key = "checkpoint" if callback is self else f"trainer.callbacks: {type(callback).__name__}"
            problem = f"{name!r} is not a metric of this run; allowed: {', '.join(sorted(known))}"
            raise ConfigurationError(f"{problem}{' and those of train/' * is_first}", key=f"{key}.monitor")
        super().on_validation_end(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush the loggers, as a resumed run does not log these steps again."""
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, MetricsLogger):
                logger.sync()
        count_completed_batches(checkpoint)


def between_steps(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether the next batch is the first of an optimizer step; runs can be resumed only there."""
    return batch_idx % trainer.accumulate_grad_batches == 0


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
                self._check_lead(trainer, number)
                trainer.save_checkpoint(self.checkpoint)
            raise Stopped(number)

    def _check_lead(self, trainer: L.Trainer, number: int) -> None:
        """Say so where a job of SLURM ends before a save does."""
        saves = [c.seconds for c in trainer.callbacks if isinstance(c, RunCheckpoint)]  # type: ignore[attr-defined]
        if number == WARNING and trainer.is_global_zero and saves and saves[0] is not None:
            line = lead_line(saves[0], time.monotonic() - self._stops.asked_at)
            if line is not None:
                print(line, file=sys.stderr, flush=True)
