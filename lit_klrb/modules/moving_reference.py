"""A reference that follows the policy: a copy of it every N steps, or a moving average of its weights."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from transformers import PreTrainedModel

from lit_klrb.distributed import sharding_mesh
from lit_klrb.engine.served import is_address
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.models import loading
from lit_klrb.models.adapters import merged_weights, separates
from lit_klrb.models.dtypes import convert
from lit_klrb.modules.regularised import RegularisedModule
from lit_klrb.rollouts.pair import Loaded

KEY = "reference_update"
# The entry of checkpoints with the current reference's weights
STATE_KEY = "current_reference"


class ReferenceUpdate(NamedTuple):
    """When the reference follows the policy, and how far.

    Args:
        every: Optimizer steps from one update to the next.
        decay: a in reference <- a reference + (1 - a) policy; 0 copies the policy.
    """

    every: int
    decay: float

    @classmethod
    def of(cls, settings: Mapping[str, Any], steps_per_rollout: int) -> Self:
        """That of {every: N}, or of {decay: a}, which follows after each rollout.

        Raises:
            ConfigurationError: If the settings have another key, or the value is out of range.
        """
        names = ", ".join(settings)
        if len(settings) != 1 or not settings.keys() <= {"every", "decay"}:
            raise ConfigurationError(f"must be {{every: N}} or {{decay: a}}, got {names}", key=KEY)
        (name, value), steps = next(iter(settings.items())), steps_per_rollout
        if name == "decay":
            if not 0 <= value < 1:
                raise ConfigurationError(f"decay must be from 0 to below 1, got {value:g}", key=KEY)
            return cls(steps, value)
        if value < 1 or value % steps:
            problem = f"every must be a multiple of {steps}, the optimizer steps per rollout, got {value:g}"
            raise ConfigurationError(problem, key=KEY)
        return cls(int(value), 0.0)

    @torch.no_grad()
    def apply(self, reference: PreTrainedModel, policy: PreTrainedModel) -> None:
        """Change the reference's weights in place; an adapter of the policy is merged on the way."""
        weights = dict(merged_weights(policy))
        for name, value in [*reference.named_parameters(), *reference.named_buffers()]:
            if name in weights and value.is_floating_point():  # other buffers are constants
                value.lerp_(weights[name].to(value), 1 - self.decay)


@dataclass(kw_only=True, eq=False, repr=False)
class MovingReferenceModule(RegularisedModule, ABC):
    """A policy that is trained on its own rollouts, between which its reference can follow it.

    Args:
        reference_update: Let the reference follow the policy, at the start of a rollout: {every: N} copies
            the policy every N optimizer steps; {decay: a} makes the reference a times itself plus 1 - a times
            the policy after each rollout. The KL of the evaluation, `val/kl`, stays that to the reference of
            the start; `val/kl_current` and `train/kl` are to the current one. A third model in memory.

    Reference: Gorbatovski et al. (2024), "Learn your reference model for real good alignment",
    arXiv:2404.09656.
    """

    reference_update: dict[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._update: ReferenceUpdate | None = None
        if self.reference_update is not None:
            path = self.reference_path
            if path in (None, loading.ITSELF) or is_address(path):
                problem = f"needs the weights of a reference, got reference_path={path}"
                raise ConfigurationError(problem, key=KEY)
            self._update = ReferenceUpdate.of(self.reference_update, self.optimizer_steps)

    @property
    @abstractmethod
    def optimizer_steps(self) -> int:
        """Number of optimizer steps per rollout."""

    @property
    @abstractmethod
    def steps_per_batch(self) -> int:
        """Number of training steps per rollout."""

    def setup(self, stage: str) -> None:
        """Refuse what keeps a reference from following."""
        super().setup(stage)
        if self._update is None:
            return
        if sharding_mesh(self.trainer) is not None:
            raise ConfigurationError("is not supported by fsdp2", key=KEY)
        if self._update.decay and self.trainer.precision in ("bf16-true", "16-true"):
            problem = f"{self.reference_update} is lost in rounding with {self.trainer.precision}"
            raise ConfigurationError(f"{problem}; use bf16-mixed", key=KEY)

    def build_models(self) -> None:
        """Build the models, and keep a copy of the reference as it is at the start."""
        super().build_models()
        if self._update is None:
            return
        second = self.pair.second
        assert second is not None
        _check_same_shapes(second, self.policy)
        first = second._replace(model=loading.freeze(copy.deepcopy(second.model)))
        self.first_reference, self.first_pair = first.model, self.pair_with(first)

    def configure_model(self) -> None:
        """Build the models; the reference gets as many digits as the policy, whose copy it becomes.

        A frozen model may have 16 bits where the policy has 32, in which small steps would be rounded away.
        """
        super().configure_model()
        if self._update is not None and self.first_pair is not None:
            dtypes = {weight.dtype for weight in self.policy.parameters()}
            convert(self.reference, max(dtypes, key=lambda dtype: torch.finfo(dtype).bits))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the reference follow before a rollout; the checkpoint of this step was saved before."""
        super().on_train_batch_start(batch, batch_idx)
        if self._update is None or batch_idx % self.steps_per_batch or self.global_step == 0:
            return
        if self.global_step % self._update.every == 0:
            self._update.apply(self.reference, self.policy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the current reference."""
        super().on_save_checkpoint(checkpoint)
        if self._update is not None:
            checkpoint[STATE_KEY] = self.reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the current reference, once the models are built."""
        super().on_load_checkpoint(checkpoint)
        if self.first_pair is not None:
            kinds = KeyError, TypeError, RuntimeError
            with refusing(f"its {STATE_KEY} is not that of this run", *kinds, key="ckpt_path"):
                self.reference.load_state_dict(checkpoint[STATE_KEY])


def _check_same_shapes(reference: Loaded, policy: PreTrainedModel) -> None:
    """Check that the weights of the policy, with its adapter merged, can be those of the reference."""
    if separates(policy):
        raise ConfigurationError("is not supported: the adapter separates embedding and head", key=KEY)
    own, merged = (
        {
            name.replace(".base_layer.", "."): weight.shape
            for name, weight in model.named_parameters()
            if ".lora_" not in name
        }
        for model in (reference.model, policy)
    )
    if own != merged:
        problem = f"needs a reference whose weights have the shapes of the policy's, got {reference.path}"
        raise ConfigurationError(problem, key=KEY)
