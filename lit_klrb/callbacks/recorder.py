"""Records a run: its configuration, its id in each checkpoint, and its summary."""

import json
import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.distributed import whole
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import csv_text, write_atomically
from lit_klrb.modules.regularised import RegularisedModule
from lit_klrb.run.checkpoints import digest
from lit_klrb.run.directory import RunDirectory
from lit_klrb.run.lightning_internals import set_logged_epoch, set_logged_step
from lit_klrb.run.machine import versions
from lit_klrb.run.same_run import RUN_KEY


class DivergedError(RuntimeError):
    """Loss or gradient are not finite; recorded in the run's summary."""


def _sizes(trainer: L.Trainer) -> dict[str, int]:
    """The number of processes, and of rows per step in all of them if the data have batches of one size."""
    rows = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    sizes = {schema.PROCESSES: trainer.world_size}
    if isinstance(rows, int):
        sizes[schema.STEP_ROWS] = rows * trainer.world_size * trainer.accumulate_grad_batches
    return sizes


def _size_line(trainer: L.Trainer) -> str:
    """A line with these sizes, and with the devices of this machine that are not used."""
    sizes, processes = _sizes(trainer), trainer.world_size
    line = f"training in {processes} process{'es' * (processes > 1)}"
    if (rows := sizes.get(schema.STEP_ROWS)) is not None:
        line += f", {rows} rows per step{f': {rows // processes} in each' * (processes > 1)}"
    if (there := trainer.accelerator.auto_device_count()) > trainer.num_devices:
        line += f"; --trainer.devices {there} would use all devices, each on a batch of its own"
    return line


class RunRecorder(L.Callback):
    """Writes `config.yaml` when a fit starts and `summary.json` when it ends; stops a run that diverges.

    If loss or gradient are not finite, the run ends with the state "diverged". This is a result like any
    other and is never retried with other random numbers.

    Args:
        directory: The run directory.
        config: The configuration as it is written, as YAML.
        settings: Gives what each checkpoint says of its run, see `lit_klrb.run.same_run.record`.
    """

    def __init__(self, directory: RunDirectory, config: str, settings: Callable[[], dict[str, Any]]) -> None:
        self.directory, self.config, self._settings = directory, config, settings
        # Whether this attempt has completed a step; an error before that is a failed start, which is undone.
        self.begun = False
        # The settings that a configuration must agree with to resume the run.
        self._record: dict[str, Any] = {}
        self._final: dict[str, float] = {}
        self._evaluated_at = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the configuration, now that everything it configures has been built."""
        self._record = self._settings()
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_atomically(self.directory.path / schema.CONFIG, self.config)
            print(_size_line(trainer))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the loggers' step to the optimizer's.

        Lightning counts them separately and can resume the former one behind.
        """
        set_logged_step(trainer, trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the norm of the gradient; stop the run if it is not finite."""
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        pl_module.log("train/grad_norm", norm)
        self._check(trainer, "the gradient's norm", norm)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the run if the loss is not finite."""
        self._check(trainer, "the loss", outputs["loss"])
        self.begun = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the trained policy, regardless of the interval between checkpoints."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.directory.checkpoint)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the run's id, and the settings that a configuration must agree with to resume it."""
        run = {"id": self.directory.run_id, "processes": trainer.world_size}
        checkpoint[RUN_KEY] = {**run, **self._record}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check the number of processes, each of which trains on its part of a batch."""
        processes = checkpoint.get(RUN_KEY, {}).get("processes", trainer.world_size)
        if trainer.state.fn == "fit" and processes != trainer.world_size:
            problem = f"must give {processes} processes, as in the run of ckpt_path, got {trainer.world_size}"
            raise ConfigurationError(problem, key="trainer.devices")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log an evaluation after n steps at step n; Lightning would log it at step n - 1."""
        set_logged_step(trainer, trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the metrics of the latest evaluation."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._final = {name.removeprefix("val/"): v for name, v in metrics.items() if name.startswith("val/")}
        self._evaluated_at = -1 if trainer.sanity_checking else trainer.global_step

    def conclude(self, trainer: L.Trainer, evaluate: Callable[[], object]) -> None:
        """Write the summary of a completed fit, with an evaluation of the final policy.

        Args:
            trainer: The trainer that ran the fit.
            evaluate: Runs the validation loop; called unless the last evaluation was after the last step.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._evaluated_at != trainer.global_step:
            set_logged_epoch(trainer)
            evaluate()
        module = trainer.lightning_module
        extra: dict[str, Any] = {schema.WEIGHTS: digest(trainer.strategy.lightning_module_state_dict())}
        selections = getattr(getattr(trainer, "datamodule", None), "selections", {})
        if rows := {split: selection.sha256 for split, selection in selections.items() if selection.sha256}:
            extra[schema.ROWS] = rows
        if isinstance(module, RegularisedModule):
            if module.prompt_means:  # empty without evaluations
                extra[schema.PROMPTS] = len(module.prompt_means[schema.KL])
            self._write_evaluation(trainer, module)
        self._write(trainer, schema.DONE, self._final, **extra)
        if not self._final:
            module.print(f"{schema.LIMIT_VAL_BATCHES} is 0: nothing was evaluated")

    def _write_evaluation(self, trainer: L.Trainer, module: RegularisedModule) -> None:
        """Write the prompts' values of the final evaluation, from which its noise can be estimated."""
        if trainer.is_global_zero:
            columns = {name: values.tolist() for name, values in module.prompt_means.items()}
            rows = enumerate(zip(*columns.values(), strict=True))
            text = csv_text(["prompt", *columns], ([prompt, *row] for prompt, row in rows))
            write_atomically(self.directory.path / schema.EVALUATION, text)

    def _check(self, trainer: L.Trainer, what: str, value: Tensor) -> None:
        if not math.isfinite(value.item()):
            message = f"diverged at step {trainer.global_step}: {what} is {value.item()}"
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._write(trainer, schema.DIVERGED, {}, reason=message)
            raise DivergedError(message)

    def _write(self, trainer: L.Trainer, state: str, final: dict[str, float], **extra: Any) -> None:
        summary = {
            "state": state,
            **_sizes(trainer),
            "steps": trainer.global_step,
            "final": {name: value if math.isfinite(value) else None for name, value in final.items()},
            "versions": versions(),
            **extra,
        }
        if trainer.is_global_zero:
            text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
            write_atomically(self.directory.path / schema.SUMMARY, text + "\n")
        self.begun = True
