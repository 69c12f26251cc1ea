"""What callbacks that look at rollouts share."""

import lightning as L

from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.rloo import RLOOModule


class RolloutCallback(L.Callback):
    """A callback for `RLOOModule` alone."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts.

        Raises:
            ConfigurationError: Naming both.
        """
        if not isinstance(pl_module, RLOOModule):
            raise ConfigurationError(
                f"trainer.callbacks: {type(self).__name__} looks at rollouts, and {type(pl_module).__name__} "
                "makes none"
            )
