"""The KL plug-in: gives the trained module a KL estimator and the weight of the KL."""

import math
from collections.abc import Collection
from typing import Any, final

import lightning as L

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator
from lit_klrb.modules.on_policy import OnPolicyModule

# The controller's error is clipped to ± this, which limits the influence of a single noisy rollout.
MAX_ERROR = 0.2
# The settings of the estimator; the others are of the weight
ESTIMATOR = "kl.estimator", "kl.final_discount", "kl.final_forward_share"


def unread_settings(module_class: type) -> tuple[str, ...]:
    """The keys, with all below them, that a class of modules does not read.

    Example:
        >>> from lit_klrb.modules import RLOOModule, SFTModule
        >>> unread_settings(RLOOModule), unread_settings(SFTModule)
        ((), ('kl',))
    """
    if not issubclass(module_class, OnPolicyModule):
        return ("kl",)
    return () if module_class.uses_kl_estimator else ESTIMATOR


@final
class KLEstimatorCallback(L.Callback):
    """Gives `RLOOModule` its KL estimator and the weight of the KL, beta.

    beta is constant by default. With final_beta it changes linearly over the run; with target_kl a controller
    adjusts it after each rollout. A module that does not use the estimator says so.

    Args:
        estimator: Estimator of the KL's gradient; `lit-klrb explain` lists all.
        beta: Weight of KL(policy‖reference), in units of reward per nat; the initial weight if it changes.
        final_beta: Weight at the last step, approached linearly.
        target_kl: Target of the KL, in nats per completion. After each rollout beta is multiplied by
            1 + clip(KL / target_kl − 1, ±0.2) · completions / horizon.
        horizon: Number of completions over which the controller changes beta by at most about 20 %.
        final_discount: Discount of the credit for later KLs at the last step, approached linearly from the
            estimator's own. From 0 to 1, a run begins with the little noise of each token's own KL, and ends
            without bias: this needs no allow_biased, as a final discount below 1 does.
        final_forward_share: Share of the forward KL at the last step, approached linearly from the
            estimator's own. From 1 to 0, a run begins with KL(reference‖policy) of each token, whose gradient
            reaches tokens that the policy almost never samples, and ends without bias.

    Raises:
        ConfigurationError: If a number is out of range, if both final_beta and target_kl are given, if
            final_discount or final_forward_share is given to an estimator without that setting, or if the
            estimator's gradient is known to be biased and allow_biased is false.

    Reference: Ziegler et al. (2019), arXiv:1909.08593, Section 2.2 (the controller).
    """

    def __init__(
        self,
        estimator: KLEstimator,
        beta: float = 0.07,
        final_beta: float | None = None,
        target_kl: float | None = None,
        horizon: int = 10_000,
        final_discount: float | None = None,
        final_forward_share: float | None = None,
    ) -> None:
        for name, value in (("beta", beta), ("final_beta", final_beta)):
            if value is not None and not 0 <= value < math.inf:
                raise ConfigurationError(f"kl.{name} must be finite and 0 or larger, got {value}")
        for name, value in (("target_kl", target_kl), ("horizon", horizon)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigurationError(f"kl.{name} must be positive and finite, got {value}")
        if final_beta is not None and target_kl is not None:
            raise ConfigurationError(
                f"kl.target_kl={target_kl} and kl.final_beta={final_beta} both move beta: give one of them"
            )
        # What the estimator remembers, and the estimator in force
        self.memory = EstimatorMemory(
            estimator, final_discount=final_discount, final_forward_share=final_forward_share
        )
        self.beta = beta
        self.final_beta, self.target_kl, self.horizon = final_beta, target_kl, horizon
        self.current = beta
        # Keys that the user chose; the command line knows
        self.chosen: Collection[str] = ("kl.estimator",)
        self.memory.check_trainable()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Install the estimator, once, and the weight of the KL."""
        name, unread = type(pl_module).__name__, unread_settings(type(pl_module))
        ignored = [key for key in unread if any(setting.startswith(key) for setting in self.chosen)]
        if stage == "fit" and ignored:
            pl_module.print(f"{name} uses no KL estimator; ignored: {', '.join(ignored)}")
        if not isinstance(pl_module, OnPolicyModule):
            return
        if "beta" in pl_module.hparams:
            problem = f"{name} has a setting of this name, which kl.beta would replace: leave it out"
            raise ConfigurationError(problem, key="beta")
        pl_module.beta = self.beta
        if not pl_module.uses_kl_estimator:
            return
        installed = getattr(pl_module, "memory", None)
        if installed is not None and installed.estimator is not self.memory.estimator:
            raise ConfigurationError(
                f"kl.estimator: {name} already has {installed.estimator}; plug in one only"
            )
        pl_module.memory = self.memory
        if stage == "fit" and self.memory.passing_bias is not None:
            pl_module.print(self.memory.passing_bias)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Update scheduled settings before a new rollout, as its score weights depend on them."""
        if not isinstance(pl_module, OnPolicyModule):
            return
        first_step = trainer.global_step - batch_idx % pl_module.steps_per_batch
        progress = first_step / trainer.max_steps
        if self.final_beta is not None:
            self.current = self.beta + progress * (self.final_beta - self.beta)
        pl_module.beta = self.current
        pl_module.log("train/beta", self.current)
        if self.memory.finals and pl_module.uses_kl_estimator:
            self.memory.progress = progress
            for name in self.memory.finals:
                pl_module.log(f"train/{name}", getattr(self.memory.estimator, name))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Adjust beta towards the target KL, after the last step on a rollout."""
        if self.target_kl is None or not isinstance(pl_module, OnPolicyModule):
            return
        if (batch_idx + 1) % pl_module.steps_per_batch == 0:
            kl, completions = pl_module.last_rollout
            error = min(max(kl / self.target_kl - 1, -MAX_ERROR), MAX_ERROR)
            self.current *= 1 + error * completions / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The current beta, and what the estimator remembers."""
        return {"current": self.current, "memory": self.memory.state_dict()}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to go on with another weight than the one in use.

        Raises:
            ConfigurationError: If the checkpoint does not hold it: Lightning would only warn.
        """
        if trainer.state.fn == "fit" and not checkpoint["callbacks"].get(self.state_key):
            raise ConfigurationError("its callbacks lack the state of KLEstimatorCallback", key="ckpt_path")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore beta and what the estimator remembers."""
        self.current = state_dict["current"]
        self.memory.load_state_dict(state_dict.get("memory", {}))
