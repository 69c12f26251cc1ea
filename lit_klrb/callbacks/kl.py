"""The plug: one KL estimator and its weight, installed into the module that trains with them."""

import lightning as L

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator


class KLEstimatorCallback(L.Callback):
    """Gives `RLOOModule` its KL estimator and the weight of the KL.

    A module without a KL term is left alone, and a line says so.

    Args:
        estimator: How the KL's gradient is estimated: `python -m lit_klrb explain` lists them all.
        beta: Weight of KL(policy‖reference) against the reward, in reward units per nat.

    Raises:
        ConfigurationError: If beta is negative, or the estimator is known to be wrong for training and is
            not allowed to be.
    """

    def __init__(self, estimator: KLEstimator, beta: float = 0.07) -> None:
        if not beta >= 0:
            raise ConfigurationError(f"kl.beta must be 0 or larger, got {beta}")
        self.estimator, self.beta = estimator, beta
        self.estimator.check_trainable()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Install the estimator, once.

        Raises:
            ConfigurationError: If the module already has one.
        """
        if not getattr(pl_module, "uses_kl_estimator", False):
            if stage == "fit":
                pl_module.print(f"{type(pl_module).__name__} has no KL term: the keys under kl are ignored")
            return
        installed = getattr(pl_module, "kl_estimator", None)
        if installed is not None and installed is not self.estimator:
            name = type(pl_module).__name__
            raise ConfigurationError(f"kl.estimator: {name} already has {installed}; plug in one only")
        pl_module.kl_estimator, pl_module.beta = self.estimator, self.beta  # type: ignore[assignment]
