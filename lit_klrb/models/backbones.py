"""Models made of parts of another: classifiers on its backbone, and students of some of its layers."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import has_adapter, merged
from lit_klrb.models.capabilities import has_weights
from lit_klrb.models.checkpoints import model_from_checkpoint, read_checkpoint
from lit_klrb.models.loading import is_checkpoint, load_tokenizer, read_folder, reading
from lit_klrb.models.roles import CLASSIFIER, check_settings, config_dict, model_from_config, other_shape
from lit_klrb.models.tokenizers import check_rows
from lit_klrb.seeding import derive_seed, forked_rng

KEY = "policy_layers"
COUNT = "num_hidden_layers"
# Settings of a classifier that those of the given model and its tokenizer determine.
GIVEN = ("model_type", "vocab_size", "pad_token_id")
# Parts of an encoder's backbone that only classification uses, so that language models may lack them.
POOLER = ".pooler."
# What determines the shapes of weights, for messages.
MAKE = "the settings make"


def classifier_on(
    key: str, path: str, settings: Mapping[str, Any], seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A classifier whose backbone is that of a given model, with a new head from the seed, and its tokenizer.

    An adapter of the given model is merged first. With fewer layers than that has, the first ones are kept.

    Args:
        key: The argument that names the model, for the error message.
        path: Hub id or folder of a language model or an encoder, or the `.ckpt` file of a policy.
        settings: The classifier's labels, and the settings that differ from the given model's.
        seed: Seed of the head's weights.
    """
    if fixed := sorted(settings.keys() & GIVEN):
        raise ConfigurationError(f"{fixed[0]} follows from {key}; leave it out", key=CLASSIFIER.config_key)
    tokenizer = load_tokenizer(key, path)
    made = {**settings, "pad_token_id": tokenizer.pad_token_id}
    with reading(key, path) as local, forked_rng(derive_seed(seed, "initial weights")):
        model = _on_checkpoint(local, made) if is_checkpoint(path) else _on_folder(local, made)
        check_rows(model, tokenizer)
    return model, tokenizer


def _on_checkpoint(path: str, settings: Mapping[str, Any]) -> PreTrainedModel:
    source = model_from_checkpoint(read_checkpoint(path))
    if has_adapter(source):
        merged(source)
    config = config_dict(source)
    check_settings({**settings, "model_type": config["model_type"]}, (), CLASSIFIER)
    model = model_from_config({**config, **settings}, CLASSIFIER)
    weights, needed = source.base_model.state_dict(), model.base_model.state_dict()
    for name, weight in needed.items():
        if name not in weights:
            raise ConfigurationError(f"it has no weights for {name}")
        if weights[name].shape != weight.shape:
            raise other_shape(name, weights[name].shape, weight.shape, MAKE)
    model.base_model.load_state_dict({name: weights[name] for name in needed})
    return model


def _on_folder(path: str, settings: Mapping[str, Any]) -> PreTrainedModel:
    model_type = AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
    check_settings({**settings, "model_type": model_type}, (), CLASSIFIER)
    model, info = read_folder(path, CLASSIFIER, **settings)
    if not has_weights(model):
        return model
    within = model.base_model_prefix + "."
    other = {name: shapes for name, *shapes in info["mismatched_keys"]}
    random = sorted({*info["missing_keys"], *other})
    if all(name.startswith(within) for name in random):
        raise ConfigurationError("it is a classifier already, which is given as classifier_path")
    for name in random:
        if name in other and name.startswith(within):
            shape, expected = other[name]
            raise other_shape(name, shape, expected, MAKE)
        if name.startswith(within) and POOLER not in name:
            raise ConfigurationError(f"it has no weights for {name}")
    return model


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
        model_type = model.config.model_type
        raise ConfigurationError(f"layers of a {model_type} model cannot be moved to other places", key=KEY)
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
