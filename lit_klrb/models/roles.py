"""Roles of models, and models with fresh weights from a plain configuration."""

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from lit_klrb.errors import ConfigurationError, brief

# Entries of a model's configuration that name code, such as modules beside the weights or kernels on the hub.
CODE_KEYS = frozenset({"auto_map", "custom_pipelines", "attn_implementation", "experts_implementation"})


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
    """A model with fresh weights, from its configuration as a plain dictionary.

    Args:
        config: `model_type` and the settings that differ from that type's defaults.
        role: What the model is used for.

    Raises:
        ConfigurationError: If `model_type` is missing or unknown, or a setting is invalid.
    """
    settings = dict(config)
    key = role.config_key
    kind = settings.pop("model_type", None)
    if kind not in role.architectures:
        raise ConfigurationError(
            f"model_type must be the name of an architecture, such as gpt2 or llama, got {kind!r}", key=key
        )
    try:
        return role.auto_class.from_config(AutoConfig.for_model(kind, **settings), trust_remote_code=False)
    except Exception as error:  # architectures raise all kinds of exceptions on wrong settings
        raise ConfigurationError(brief(error), key=key) from error


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
        return {key: without_code(value) for key, value in config.items() if key not in CODE_KEYS}
    return [without_code(value) for value in config] if isinstance(config, list) else config
