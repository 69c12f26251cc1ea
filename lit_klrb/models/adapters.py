"""LoRA adapters by `peft`, injected into the model in place, which keeps its class, backbone and head."""

import json
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.models.capabilities import has_weights
from lit_klrb.seeding import forked_rng

ADAPTER = "default"
# Arguments of LoraConfig with which peft imports a module of the given name.
IMPORTING_ARGUMENTS = {"megatron_config", "megatron_core"}
# Initialisations that decompose the weights of a layer
OF_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
# Arguments that select layers, by regular expressions or names, and that initialise them.
PREPARING: dict[str, Any] = {"target_modules": "all-linear", "init_lora_weights": True} | dict.fromkeys(
    ("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters")
)


def add_adapter(model: PreTrainedModel, settings: dict[str, Any], seed: int) -> PreTrainedModel:
    """Add a new LoRA adapter to a model and freeze everything else; the model's outputs do not change yet.

    Args:
        model: The model, changed in place.
        settings: Arguments of `peft.LoraConfig`, such as {"r": 8, "lora_alpha": 16}; by default every linear
            layer gets an adapter except the head, which is applied tile by tile.
        seed: Seed of the adapter's weights.
    """
    if has_adapter(model):
        problem = "the policy already has an adapter, whose training continues; leave lora out"
        raise ConfigurationError(f"{settings}: {problem}", key="lora")
    if modules := sorted(settings.keys() & IMPORTING_ARGUMENTS):
        raise ConfigurationError(f"{modules[0]} makes peft import a module; leave it out", key="lora")
    if find_spec("peft") is None:
        raise ConfigurationError("needs peft: pip install 'lit-klrb[peft]'", key="lora")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils.other import AuxiliaryTrainingWrapper

    with refusing(str(settings), TypeError, ValueError, key="lora"):
        config = LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})
        if not has_weights(model) and str(config.init_lora_weights).startswith(OF_WEIGHTS):
            config.init_lora_weights = True
        with forked_rng(seed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # GPT-2's transposed layers
            # Not the model's own add_adapter, which refuses releases of peft that work
            inject_adapter_in_model(config, model, ADAPTER)
    model._hf_peft_config_loaded = True
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules()):
        problem = "layers that are trained in whole, or tokens, are not supported beside an adapter"
        remedy = "leave out modules_to_save and trainable_token_indices"
        raise ConfigurationError(f"{settings}: {problem}; {remedy}", key="lora")
    _check_shared(model)
    return model


def stored_adapter(
    model: PreTrainedModel, settings: dict[str, Any], weights: Collection[str]
) -> PreTrainedModel:
    """Add the adapter of a checkpoint, whose weights are loaded next.

    Which layers have one follows from the names of the weights. The settings' initialisation is not used, as
    the stored weights replace it.
    """
    layers = sorted({name.partition(".lora_")[0] for name in weights if ".lora_" in name})
    used = {key: value for key, value in settings.items() if key not in PREPARING}
    add_adapter(model, {**used, "target_modules": layers}, seed=0)
    (config,) = model.peft_config.values()
    for key, default in PREPARING.items():  # so that the next checkpoint has the same settings
        setattr(config, key, settings.get(key, default))
    return model


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether the model has an adapter."""
    return bool(getattr(model, "peft_config", None))


def adapter_settings(model: PreTrainedModel) -> dict[str, Any] | None:
    """Settings with which `add_adapter` adds an adapter of the same shape; None without an adapter."""
    if not has_adapter(model):
        return None
    config: Any = next(iter(model.peft_config.values()))
    settings_set, default = (
        json.loads(json.dumps(c.to_dict(), default=sorted)) for c in (config, type(config)())
    )
    return {key: value for key, value in settings_set.items() if value != default[key]}


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Disable the adapter inside the block."""
    layers = _adapted(model).values()
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Merge the adapter into the weights permanently; the result is a model without an adapter.

    A weight that embedding and head share becomes two if one of them has an adapter, as it changes that one
    only.

    Raises:
        ConfigurationError: If other layers share a weight that has an adapter.
    """
    shared = _check_shared(model)
    for name, module in _adapted(model).items():
        base: Any = module.get_base_layer()
        if name in shared:
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    if shared:
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights that the model would have after `merged`; it is not changed."""
    layers = _adapted(model) if has_adapter(model) else {}
    inside = tuple(f"{name}." for name in layers)
    for name, weight in model.state_dict().items():
        if not name.startswith(inside):
            yield name, weight
    for layer, module in layers.items():
        copy = deepcopy(module)
        copy.merge()
        for name, weight in copy.get_base_layer().state_dict().items():
            yield f"{layer}.{name}", weight


def adapted_weights(model: PreTrainedModel) -> Iterator[tuple[Any, Tensor]]:
    """Linear layers whose adapter is a sum W + B A, and that sum; not of other variants, such as DoRA."""
    if not has_adapter(model):
        return
    from peft.tuners.lora import Linear

    for layer in _adapted(model).values():
        names = layer.active_adapters
        is_used = issubclass(type(layer), Linear) and not layer.merged and not layer.disable_adapters
        if is_used and all(n not in layer.lora_variant and layer.lora_B[n].bias is None for n in names):
            yield layer, layer.get_base_layer().weight + sum(map(layer.get_delta_weight, names))


def separates(model: PreTrainedModel) -> bool:
    """Whether `merged` unties the head from the embedding."""
    return has_adapter(model) and bool(_check_shared(model))


def _adapted(model: PreTrainedModel) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _check_shared(model: PreTrainedModel) -> set[str]:
    """The layers with an adapter whose weight is that of another layer, too.

    Raises:
        ConfigurationError: If they are not embedding and head, the only ones that can be separated.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), []).append(module)
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    ends = [layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer for layer in layers]
    shared = set()
    for name, module in _adapted(model).items():
        users = [user for weight in module.get_base_layer().parameters() for user in owners[id(weight)][1:]]
        if not users:
            continue
        if not all(any(user is end for end in ends) for user in (module.get_base_layer(), *users)):
            problem = f"the weight of {name} is also that of other layers"
            why = "from which an adapter cannot be told after a merge; leave it out of target_modules"
            raise ConfigurationError(f"{problem}, {why}", key="lora")
        shared.add(name)
    return shared
