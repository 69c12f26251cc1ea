"""What a run leaves behind: its configuration, its identity in each checkpoint, and how it ended."""

import json
import math
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import lightning as L
import torch
import yaml
from torch import Tensor

import lit_klrb
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_atomically
from lit_klrb.run.checkpoints import digest
from lit_klrb.run.directory import RunDirectory
from lit_klrb.run.lightning_internals import set_logged_step
from lit_klrb.run.same_run import RUN_KEY, record

# Their releases can change a run's numbers.
PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "numpy")


class DivergedError(RuntimeError):
    """Training left the finite numbers; the run's summary records it."""


def versions() -> dict[str, str]:
    """The versions a run's numbers depend on."""
    packages = {name: version(name) for name in PACKAGES}
    return {"lit_klrb": lit_klrb.__version__, "python": platform.python_version(), **packages}


class RunRecorder(L.Callback):
    """Writes `config.yaml` when a fit starts and `summary.json` when it ends; stops a run that diverges.

    A loss or a gradient that is not finite ends the run with the state "diverged": a result, recorded as
    such, never retried with other draws.

    Args:
        directory: The run directory.
        config: The resolved configuration, as YAML.
    """

    def __init__(self, directory: RunDirectory, config: str) -> None:
        self.directory, self.config = directory, config
        # Whether this attempt has left anything; what fails before that is a failed start.
        self.begun = False
        # What a configuration must agree with to resume the run.
        self._record: dict[str, Any] = {}
        self._final: dict[str, float] = {}
        self._evaluated_at = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the configuration: what it asks for has been made by now."""
        self._record = record(yaml.safe_load(self.config) or {})
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_atomically(self.directory.path / schema.CONFIG, self.config)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let a resumed run log at the steps it would have logged at.

        Lightning counts the loggers' steps apart from the optimizer's, and can resume them one behind.
        """
        set_logged_step(trainer, trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the gradient's norm; refuse to step on one that is not finite."""
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        pl_module.log("train/grad_norm", norm)
        self._check(trainer, "the gradient's norm", norm)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop on a loss that is not finite."""
        self._check(trainer, "the loss", outputs["loss"])
        self.begun = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the trained policy, whatever rhythm checkpoints are written in."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.directory.checkpoint)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add which run the checkpoint belongs to, and what a configuration must agree with to resume it."""
        run = {"id": self.directory.run_id, "processes": trainer.world_size}
        checkpoint[RUN_KEY] = {**run, **self._record}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to resume in more or fewer processes: each trains on its share of a batch.

        Raises:
            ConfigurationError: Naming both numbers.
        """
        processes = checkpoint.get(RUN_KEY, {}).get("processes", trainer.world_size)
        if trainer.state.fn == "fit" and processes != trainer.world_size:
            raise ConfigurationError(
                f"the run of ckpt_path has {processes} processes, not {trainer.world_size}; resume it with "
                "as many",
                key="trainer.devices",
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the newest evaluation."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._final = {name.removeprefix("val/"): v for name, v in metrics.items() if name.startswith("val/")}
        self._evaluated_at = -1 if trainer.sanity_checking else trainer.global_step

    def conclude(self, trainer: L.Trainer, evaluate: Callable[[], object]) -> None:
        """Record how a fit ended, with an evaluation of the policy it ended with.

        Args:
            trainer: What ran the fit.
            evaluate: Runs the validation loop, in case the last one was before the last step.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._evaluated_at != trainer.global_step:
            # An evaluation after n steps is logged beside the last of them, as Lightning does within a fit.
            set_logged_step(trainer, max(0, trainer.global_step - 1))
            evaluate()
        self._write(
            trainer, schema.DONE, self._final, weights_sha256=digest(trainer.lightning_module.state_dict())
        )

    def _check(self, trainer: L.Trainer, what: str, value: Tensor) -> None:
        if not math.isfinite(value.item()):
            message = f"diverged at step {trainer.global_step}: {what} is {value.item()}"
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._write(trainer, schema.DIVERGED, {}, reason=message)
            raise DivergedError(message)

    def _write(self, trainer: L.Trainer, state: str, final: dict[str, float], **extra: str) -> None:
        summary = {
            "state": state,
            "steps": trainer.global_step,
            "final": {name: value if math.isfinite(value) else None for name, value in final.items()},
            "versions": versions(),
            **extra,
        }
        if trainer.is_global_zero:
            text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
            write_atomically(self.directory.path / schema.SUMMARY, text + "\n")
        self.begun = True
