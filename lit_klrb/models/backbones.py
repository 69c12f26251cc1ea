"""Classifiers with a new head on the backbone of another model, such as a language model."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import has_adapter, merged
from lit_klrb.models.checkpoints import model_from_checkpoint, read_checkpoint
from lit_klrb.models.loading import is_checkpoint, load_tokenizer, read_folder, reading
from lit_klrb.models.roles import CLASSIFIER, check_settings, config_dict, model_from_config, other_shape
from lit_klrb.models.trials import has_weights
from lit_klrb.seeding import derive_seed, forked_rng

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
    with reading(key, path) as place, forked_rng(derive_seed(seed, "initial weights")):
        model = _on_checkpoint(place, made) if is_checkpoint(path) else _on_folder(place, made)
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
    kind = AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
    check_settings({**settings, "model_type": kind}, (), CLASSIFIER)
    model, found = read_folder(path, CLASSIFIER, **settings)
    if not has_weights(model):
        return model
    within = model.base_model_prefix + "."
    other = {name: shapes for name, *shapes in found["mismatched_keys"]}
    random = sorted({*found["missing_keys"], *other})
    if all(name.startswith(within) for name in random):
        raise ConfigurationError("it is a classifier already, which is given as classifier_path")
    for name in random:
        if name in other and name.startswith(within):
            given, expected = other[name]
            raise other_shape(name, given, expected, MAKE)
        if name.startswith(within) and POOLER not in name:
            raise ConfigurationError(f"it has no weights for {name}")
    return model
