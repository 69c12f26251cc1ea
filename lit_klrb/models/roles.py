"""Roles of models, and models with fresh weights from a plain configuration."""

import difflib
import json
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.models.capabilities import SHORTEST, eval_mode, has_weights, in_float32, reads_padding

# Number of tokens of the text of capability checks.
PROBE_LENGTH = 10
# Entries of a model's configuration that name code, such as modules beside the weights or kernels on the hub.
CODE_KEYS = ("auto_map", "custom_pipelines", "attn_implementation", "experts_implementation")


class Role(NamedTuple):
    """What a model is used for.

    Args:
        name: The name of the attribute that holds the model in a Lightning module.
        auto_class: The class of transformers that loads it.
        architectures: The supported values of `model_type`.
    """

    name: str
    auto_class: Any
    architectures: Collection[str]

    @property
    def config_key(self) -> str:
        """The key of the model's configuration in checkpoints and among a module's arguments."""
        return f"{self.name}_config"


POLICY = Role("policy", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CLASSIFIER = Role(
    "classifier", AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
)


def model_from_config(config: dict[str, Any], role: Role = POLICY) -> PreTrainedModel:
    """A model with fresh weights, from its configuration as a plain dictionary."""
    settings = dict(config)
    key = role.config_key
    model_type = settings.pop("model_type", None)
    if model_type not in role.architectures:
        raise ConfigurationError(
            f"model_type must be the name of an architecture, such as gpt2 or llama, got {model_type!r}",
            key=key,
        )
    with refusing(_shown(config), key=key):  # architectures raise all kinds of exceptions
        made = AutoConfig.for_model(model_type, **settings)
        # The dtype of the file from which it once came is kept, but is not that of these weights
        file, made.dtype = made.dtype, None
        model = role.auto_class.from_config(made, trust_remote_code=False)
        model.config.dtype = file
    fuse_activations(model)
    if empty := [name for name, weight in model.named_parameters() if not weight.numel()]:
        raise ConfigurationError(f"{_shown(config)} leaves the weight {empty[0]} empty", key=key)
    return model


def other_shape(
    name: str, shape: Any, expected: Any, makes: str = "its configuration makes"
) -> ConfigurationError:
    """The error for a weight whose shape is not the model's."""
    shapes = f"{list(shape)}; {makes} it {list(expected)}"
    return ConfigurationError(f"the weight {name} has the shape {shapes}")


def fuse_activations(model: PreTrainedModel) -> None:
    """Compute `gelu_new`, the activation of GPT-2, by torch's function, one operation instead of nine.

    Results differ by rounding only; configuration and weights do not change. The nine operations take a
    quarter of the time of a small GPT-2, and several times the memory of their result in training.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, GELUTanh())


def check_settings(config: dict[str, Any], given: Collection[str], role: Role) -> None:
    """Check that the type of a new model has all settings, and that the tokenizer determines none of them."""
    model_type = config.get("model_type")
    if model_type not in role.architectures:
        return  # model_from_config raises
    known = AutoConfig.for_model(str(model_type))
    for name, value in config.items():
        if name in given:
            raise ConfigurationError(f"{name} follows from the tokenizer; leave it out", key=role.config_key)
        if not hasattr(known, name):
            close = difflib.get_close_matches(name, known.to_dict(), n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigurationError(f"{model_type} has no setting {name}{hint}", key=role.config_key)
        if type(value) is int and value < 0:
            raise ConfigurationError(f"{name} must not be negative, got {value}", key=role.config_key)


@torch.no_grad()
def check_predicts(key: str | None, model: PreTrainedModel, role: Role) -> None:
    """Check a language model: it is causal, which encoders are not, its logits are finite, and padding has no
    effect on them.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or 1000
    if role == POLICY and 0 < positions < SHORTEST:
        raise ConfigurationError(f"its context length, {positions}, is below {SHORTEST}", key=key)
    # Some architectures reserve two positions
    length = min(PROBE_LENGTH, positions) - 2
    if role != POLICY or length < 2 or not has_weights(model):
        return
    tokens = torch.zeros(2, length, dtype=torch.long, device=model.device)
    tokens[1, 1:] = 1
    with eval_mode(model), in_float32(model):
        logits = model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[:, 0]
        padding_matters = reads_padding(model)
    if not logits.isfinite().all():
        raise ConfigurationError("its weights give logits that are not finite", key=key)
    rounding = max(1e-3, 16 * torch.finfo(logits.dtype).eps)
    if (logits[0] - logits[1]).abs().max() > rounding * logits.abs().max():
        model_type = model.config.model_type
        raise ConfigurationError(
            f"a {model_type} model reads the tokens it should predict: not a policy", key=key
        )
    if padding_matters:
        problem = f"padding on the left of a prompt changes what a {model.config.model_type} model predicts"
        raise ConfigurationError(f"{problem}: prompts of different lengths cannot be read together", key=key)


def _shown(config: dict[str, Any]) -> str:
    """The settings, shortened to a hundred characters."""
    return textwrap.shorten(str(config), 100, placeholder=" ...}")


def config_dict(model: PreTrainedModel) -> dict[str, Any]:
    """The model's configuration as plain numbers and strings, to be stored in a checkpoint."""
    return without_code(json.loads(model.config.to_json_string(use_diff=False)))


def without_code(config: Any) -> Any:
    """Remove the entries that name code from a configuration, at any depth.

    Example:
        >>> without_code({"model_type": "gpt2", "auto_map": {"AutoConfig": "theirs.Config"}})
        {'model_type': 'gpt2'}
    """
    if isinstance(config, dict):
        # Some have internal spellings, too: `_attn_implementation`, `_attn_implementation_internal`
        data = {k: v for k, v in config.items() if not any(code in str(k) for code in CODE_KEYS)}
        return {key: without_code(value) for key, value in data.items()}
    return [without_code(value) for value in config] if isinstance(config, list) else config
