"""Models made of some of another model's layers, such as students that are pruned and then healed."""

import copy
import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import has_adapter
from lit_klrb.models.roles import config_dict, model_from_config
from lit_klrb.seeding import forked_rng

KEY = "policy_layers"
COUNT = "num_hidden_layers"


def with_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model with some of the layers of another, in the given order, and all else the same.

    It is an ordinary model of its architecture with fewer layers: its configuration has their number, and the
    entries of kept layers in settings that have one per layer, such as `layer_types`.
    """
    check_layers(layers)
    if has_adapter(model):
        raise ConfigurationError("needs a policy without an adapter; export it first, merged", key=KEY)
    stack, count = _stack(model)
    if outside := [index for index in layers if index >= count]:
        raise ConfigurationError(f"{outside[0]} is not a layer: they are 0 to {count - 1}", key=KEY)
    config = config_dict(model)
    name = model.config.attribute_map.get(COUNT, COUNT)
    names = [key for key, value in config.items() if isinstance(value, list) and len(value) == count]
    lists = {key: config[key] for key in names if re.search("layer|block", key)}
    config |= {key: [value[index] for index in layers] for key, value in lists.items()}
    with forked_rng(0), model.device:  # the random initial weights are overwritten
        kept = model_from_config({**config, name: len(layers)})
    weights = model.state_dict()
    sources = {key: _source(key, stack, layers) for key in kept.state_dict()}
    shapes = {key: value.shape for key, value in kept.state_dict().items()}
    if any(sources[key] not in weights or weights[sources[key]].shape != shapes[key] for key in shapes):
        kind = model.config.model_type
        raise ConfigurationError(f"layers of a {kind} model cannot be moved to other places", key=KEY)
    kept.load_state_dict({key: weights[source] for key, source in sources.items()})
    kept.generation_config = copy.deepcopy(model.generation_config)
    return kept.to(model.dtype).train(model.training)  # type: ignore[arg-type]


def check_layers(layers: Sequence[int]) -> None:
    """Check indices without the model that they are of."""
    if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
        raise ConfigurationError(f"must be different indices of layers, from 0, got {list(layers)}", key=KEY)


def _stack(model: PreTrainedModel) -> tuple[str, int]:
    """Name and length of the list of layers: the outermost list of as many modules as there are layers."""
    count = getattr(model.config, COUNT, None)
    lists = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    depth = min((name.count(".") for name in lists), default=0)
    outermost = [name for name in lists if name.count(".") == depth]
    if count is None or len(outermost) != 1:
        raise ConfigurationError(f"a {model.config.model_type} model has no single stack of layers", key=KEY)
    return outermost[0], count


def _source(key: str, stack: str, layers: Sequence[int]) -> str:
    """The name of a kept model's weight in the original model."""
    match = re.match(rf"({re.escape(stack)}\.)(\d+)(\..*)", key)
    return key if match is None else f"{match[1]}{layers[int(match[2])]}{match[3]}"
