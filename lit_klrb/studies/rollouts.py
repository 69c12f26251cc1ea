"""What callbacks that look at rollouts share."""

import lightning as L

from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.rloo import RLOOModule


class RolloutCallback(L.Callback):
    """A callback for the training of `RLOOModule` alone."""

    _fits = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts, and a command that does not train.

        Raises:
            ConfigurationError: Naming the callback, and the module or the command.
        """
        if not isinstance(pl_module, RLOOModule):
            raise ConfigurationError(
                f"trainer.callbacks: {type(self).__name__} looks at rollouts, and {type(pl_module).__name__} "
                "makes none"
            )
        self._fits = self._fits or stage == "fit"  # a fit ends with an evaluation
        if not self._fits:
            raise ConfigurationError(
                f"trainer.callbacks: {type(self).__name__} measures training, and this command does not "
                "train; use fit"
            )
