"""A check for callbacks that measure training on rollouts."""

import lightning as L

from lit_klrb.distributed import sharding_mesh
from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.rloo import OnPolicyModule


def require_rollouts(callback: L.Callback, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
    """Check that the module has rollouts and the command trains.

    Args:
        callback: The callback, whose `setup` calls this.
        trainer: The trainer.
        module: The trained module.
        stage: "fit", "validate", "test" or "predict".

    Raises:
        ConfigurationError: If not, or the policy is sharded; names the callback and the module.
    """
    name = f"trainer.callbacks: {type(callback).__name__}"
    if not isinstance(module, OnPolicyModule):
        raise ConfigurationError(f"{name} measures rollouts, but {type(module).__name__} has none")
    if stage != "fit" and not trainer.global_step:  # steps were made if this is the evaluation after a fit
        raise ConfigurationError(f"{name} measures training, but this command does not train; use fit")
    if sharding_mesh(trainer) is not None:
        raise ConfigurationError(f"{name} needs whole models, which ModelParallelStrategy divides")
