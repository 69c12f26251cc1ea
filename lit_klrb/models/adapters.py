"""LoRA adapters through `peft`, injected into the model itself: it keeps its class, backbone and head."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from lit_klrb.errors import ConfigurationError
from lit_klrb.seeding import forked_rng

ADAPTER = "default"
# Arguments of LoraConfig that make peft import a module of any name.
IMPORTED = {"megatron_config", "megatron_core"}


def add_adapter(model: PreTrainedModel, settings: dict[str, Any], seed: int) -> PreTrainedModel:
    """Put a fresh LoRA adapter on a model, which it does not change yet; only the adapter is trained then.

    Args:
        model: The model, changed in place.
        settings: Arguments of `peft.LoraConfig`, such as {"r": 8, "lora_alpha": 16}; by default the adapter
            is on every linear layer but the head, which is read tile by tile.
        seed: Decides its weights.

    Raises:
        ConfigurationError: If `peft` is not installed, refuses the settings, or there is an adapter already.
    """
    if has_adapter(model):
        raise ConfigurationError(
            f"{settings}: the policy has an adapter already, which is trained on; leave lora out", key="lora"
        )
    if modules := sorted(settings.keys() & IMPORTED):
        raise ConfigurationError(f"{modules[0]} makes peft import a module; leave it out", key="lora")
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigurationError("needs peft: pip install 'lit-klrb[peft]'", key="lora") from None
    try:
        config = LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})
        with forked_rng(seed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # GPT-2's transposed layers
            model.add_adapter(config, ADAPTER)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{settings}: {' '.join(str(error).split())}", key="lora") from None
    return model


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether there is an adapter on the model."""
    return bool(getattr(model, "peft_config", None))


def adapter_settings(model: PreTrainedModel) -> dict[str, Any] | None:
    """What `add_adapter` needs to put an adapter of the same shape on a model; None if there is none."""
    if not has_adapter(model):
        return None
    config: Any = model.peft_config
    given, default = (json.loads(json.dumps(c.to_dict(), default=sorted)) for c in _with_default(config))
    return {key: value for key, value in given.items() if value != default[key]}


def _with_default(configs: dict[str, Any]) -> tuple[Any, Any]:
    (config,) = configs.values()
    return config, type(config)()


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model as it was before the adapter, inside the block."""
    model.disable_adapters()
    try:
        yield model
    finally:
        model.enable_adapters()


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the adapter added to its weights for good, for those who know nothing of adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model
