"""A teacher that is the moving average of its student."""

from typing import Any, final

import lightning as L
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.models.sharding import is_sharded
from lit_klrb.modules.on_policy import OnPolicyModule

# Key of its weights in checkpoints.
KEY = "moving_average_teacher"


@final
class MovingAverageTeacher(L.Callback):
    """The reference follows the policy: reference = decay · reference + (1 - decay) · policy.

    It is updated after the last optimizer step on each rollout. With decay 1 it stays what reference_path
    names; with decay 0 it is the policy before the step, as with reference_path: policy. Every KL is to the
    reference of the moment. Checkpoints contain its weights.

    Args:
        decay: Share of the reference that stays, per rollout, from 0 to 1; the average reaches back about
            1 / (1 - decay) rollouts.

    Raises:
        ConfigurationError: If decay is out of range.

    Reference: Tarvainen, Valpola (2017), "Mean teachers are better role models", arXiv:1703.01780.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay <= 1:
            raise ConfigurationError(f"must be between 0 and 1, got {decay}", key="decay")
        self._update = get_ema_multi_avg_fn(decay)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that policy and reference have the same weights to average.

        Raises:
            ConfigurationError: If not.
        """
        key, name = "trainer.callbacks", type(self).__name__
        if not isinstance(pl_module, OnPolicyModule):
            raise ConfigurationError(f"{name} is not for {type(pl_module).__name__}", key=key)
        if not hasattr(pl_module, "reference") or is_sharded(pl_module.policy):
            raise ConfigurationError(
                f"{name} needs a teacher with weights of its own, not sharded: a folder as reference_path, "
                f"got {pl_module.reference_path}",
                key=key,
            )
        policy, reference = (
            {name: (value.shape, value.dtype) for name, value in model.named_parameters()}
            for model in (pl_module.policy, pl_module.reference)
        )
        if policy != reference:
            raise ConfigurationError(
                f"{name} needs a policy and a reference of one architecture, without a new adapter", key=key
            )
        if any(dtype.itemsize < 4 for _, dtype in reference.values()):
            raise ConfigurationError(
                f"{name} needs weights in float32, in which small changes are not rounded away: "
                "trainer.precision=32-true or bf16-mixed",
                key=key,
            )

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the reference after the last step on a rollout, whose states are the old reference's."""
        if (batch_idx + 1) % pl_module.steps_per_batch == 0:
            models = pl_module.reference, pl_module.policy
            self._update(*(list(model.parameters()) for model in models), None)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the reference's weights."""
        checkpoint[KEY] = pl_module.reference.state_dict()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the reference's weights.

        Raises:
            ConfigurationError: If the checkpoint does not contain them.
        """
        kinds = AttributeError, KeyError, RuntimeError, TypeError
        with refusing("the weights of its moving average cannot be read", *kinds, key="ckpt_path"):
            pl_module.reference.load_state_dict(checkpoint[KEY])
