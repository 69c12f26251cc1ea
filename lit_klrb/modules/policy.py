"""Base class of the modules that train a language model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.backbones import check_layers, with_layers
from lit_klrb.modules.base import TrainedModule
from lit_klrb.seeding import derive_seed


@dataclass(kw_only=True, eq=False, repr=False)
class PolicyModule(TrainedModule, ABC):
    """A module that trains a language model.

    Args:
        policy_path: The initial policy: a hub id, a folder, a .gguf file or a checkpoint. If it has an
            adapter, only the adapter is trained.
        policy_layers: Indices of the layers of that model to keep, such as [0, 1, 2, 5], in this order; by
            default all.
        lora: Train a new LoRA adapter instead of all weights: arguments of `peft.LoraConfig`, such as
            {r: 8, lora_alpha: 16}. By default every linear layer except the head has an adapter.
    """

    role = loading.POLICY

    policy_path: str | None = None
    policy_layers: list[int] | None = None
    lora: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy: PreTrainedModel
        if self.policy_layers is not None:
            check_layers(self.policy_layers)
            config = loading.POLICY.config_key
            if getattr(self, config, None) is not None:
                raise ConfigurationError(
                    f"needs policy_path; {config} has its own number of layers", key="policy_layers"
                )

    @abstractmethod
    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The initial policy, without a new adapter, and its tokenizer."""

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy to train: with the layers to keep, a new adapter if `lora` is set, and its tokenizer."""
        policy, tokenizer = self.build_policy()
        if self.policy_layers is not None:
            policy = with_layers(policy, self.policy_layers)
        if self.lora is not None:
            policy = add_adapter(policy, self.lora, derive_seed(self.seed, "adapter"))
        return policy, tokenizer
