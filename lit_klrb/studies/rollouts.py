"""What callbacks that measure the training on rollouts share."""

import lightning as L

from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.rloo import OnPolicyModule


def require_rollouts(callback: L.Callback, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
    """Refuse a module without rollouts, and a command that does not train.

    Args:
        callback: Whose `setup` this is.
        trainer: The trainer.
        module: The module that the trainer runs.
        stage: "fit", "validate", "test" or "predict".

    Raises:
        ConfigurationError: Naming the callback, and the module or the command.
    """
    name = f"trainer.callbacks: {type(callback).__name__}"
    if not isinstance(module, OnPolicyModule):
        raise ConfigurationError(f"{name} measures rollouts, and {type(module).__name__} has none")
    if stage != "fit" and not trainer.global_step:  # a fit ends with an evaluation
        raise ConfigurationError(f"{name} measures training, and this command does not train; use fit")
