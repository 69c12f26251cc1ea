"""What every run adds to Lightning's Trainer, and which option Lightning refuses."""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback, ProgressBar

from lit_klrb.callbacks import DistillationMonitor, KLEstimatorCallback, RunProgressBar
from lit_klrb.distributed import cluster_plugins
from lit_klrb.errors import ConfigurationError
from lit_klrb.run.checkpoints import CheckpointFiles
from lit_klrb.run.options import check_accelerator, check_precision, prefer_determinism

TRAINER_DEFAULTS = {
    "trainer.default_root_dir": "runs/unnamed",
    # Each process adds a batch to a step, so the machine does not decide how many there are
    "trainer.devices": 1,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": -1,
    # Batches depend on (seed, step, rank) already, and every process evaluates on all prompts
    "trainer.use_distributed_sampler": False,
}


def prepare_trainer(config: Namespace, module: Any, own: list[Callback], is_run: bool) -> None:
    """Check the trainer's settings, and add callbacks and plugins to them.

    Args:
        config: The settings, which this changes.
        module: The module that the trainer runs.
        own: Callbacks of the command.
        is_run: Whether it is a training run with a directory.
    """
    check_accelerator(config.accelerator)
    check_precision(config)
    prefer_determinism(config)
    callbacks = _as_list(config.callbacks)
    if any(isinstance(callback, KLEstimatorCallback) for callback in callbacks):
        problem = "KLEstimatorCallback is what the keys under kl set; plug in one only"
        raise ConfigurationError(f"trainer.callbacks: {problem}")
    if config.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
        own.append(RunProgressBar())
    is_monitored = any(isinstance(c, DistillationMonitor) for c in callbacks)
    if not getattr(module, "trains_on_reward", True) and is_run and not is_monitored:
        own.append(DistillationMonitor())
    config.callbacks = [*callbacks, *own]
    config.plugins = [*_as_list(config.plugins), CheckpointFiles(), *cluster_plugins()]
    config.logger = [] if config.logger is True else _as_list(config.logger)


def refuse_option(settings: Mapping[str, Any], keys: Iterable[str], error: Exception) -> None:
    """Name the option without which Lightning accepts the trainer's settings, if one alone is the reason.

    Args:
        settings: All arguments of the trainer.
        keys: Keys of settings that the user chose, such as trainer.precision.
        error: Why Lightning refuses them.

    Raises:
        ConfigurationError: With the option, its value and Lightning's reason.
    """
    chosen = {key.split(".")[1] for key in keys if key.startswith("trainer.")}
    for name in sorted(chosen & settings.keys()):
        try:
            # Lightning appends to lists of callbacks
            L.Trainer(**{key: copy(value) for key, value in settings.items() if key != name})
        except Exception:  # another option is the reason, or both are
            continue
        text = " ".join(str(error).split()) or type(error).__name__
        reason = text.split(". ")[0].rstrip(".!")
        raise ConfigurationError(f"trainer.{name}: {settings[name]!r} is refused: {reason}") from error


def _as_list(value: Any) -> list[Any]:
    """Convert None and False to an empty list, and a single element to a list."""
    return [] if value is None or value is False else list(value) if isinstance(value, list) else [value]
