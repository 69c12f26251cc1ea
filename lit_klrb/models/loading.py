"""Policies, references, classifiers and tokenizers, from a hub id, a folder or a Lightning checkpoint.

A checkpoint written by this package is self-contained: beside the weights it carries the model's
configuration and the tokenizer's files, so that it can be loaded, exported or trained on from anywhere.
"""

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import add_adapter, has_adapter, merged
from lit_klrb.seeding import derive_seed, forked_rng

Module = TypeVar("Module", bound=nn.Module)

TOKENIZER_KEY, ADAPTER_KEY = "tokenizer_files", "adapter"
GRAMMAR = "grammar"


class Role(NamedTuple):
    """What a model is for: the attribute of a module that holds it, its class, its architectures."""

    name: str
    auto_class: Any
    architectures: Collection[str]

    @property
    def config_key(self) -> str:
        """Where a checkpoint keeps the model's configuration, and a module takes a fresh one's."""
        return f"{self.name}_config"


POLICY = Role("policy", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CLASSIFIER = Role(
    "classifier", AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
)


def is_checkpoint(path: str) -> bool:
    """Whether `path` names a Lightning checkpoint rather than a folder or a hub id."""
    return path.endswith(".ckpt")


def looks_local(path: str) -> bool:
    """Whether `path` can only mean a place on this machine: a hub id is `name` or `owner/name`."""
    return (
        is_checkpoint(path) or Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    )


def check_exists(key: str, path: str) -> None:
    """Refuse a local path that is not there; hub ids pass.

    Raises:
        ConfigurationError: With the configuration key and the path.
    """
    if looks_local(path) and not Path(path).expanduser().exists():
        raise ConfigurationError(f"{path} does not exist", key=key)


def read_checkpoint(path: str, role: Role = POLICY) -> dict[str, Any]:
    """A Lightning checkpoint's content, on the CPU and without running any pickled code.

    Raises:
        ConfigurationError: If it cannot be read, or holds no model for the role.
    """
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no checkpoint raise whatever they are taken for
        raise ConfigurationError(f"{path} is no checkpoint: {_first_line(error)}") from None
    if role.config_key not in checkpoint:
        raise ConfigurationError(f"{path} holds no {role.name}: no lit_klrb module that has one wrote it")
    return checkpoint


def model_from_config(config: dict[str, Any], role: Role = POLICY) -> PreTrainedModel:
    """A model with fresh weights, from its configuration as a plain dictionary.

    Raises:
        ConfigurationError: If `model_type` is missing or unknown, or a setting does not suit it.
    """
    settings = dict(config)
    key = role.config_key
    kind = settings.pop("model_type", None)
    if kind not in role.architectures:
        raise ConfigurationError(
            f"model_type is {kind!r}; the name of an architecture expected, such as gpt2 or llama", key=key
        )
    try:
        return role.auto_class.from_config(AutoConfig.for_model(kind, **settings))
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigurationError(" ".join(str(error).split()), key=key) from None


def model_from_checkpoint(checkpoint: dict[str, Any], role: Role = POLICY) -> PreTrainedModel:
    """The model a checkpoint holds, weights included."""
    with forked_rng(0):  # fresh weights are drawn only to be overwritten
        model = model_from_config(checkpoint[role.config_key], role)
        if checkpoint.get(ADAPTER_KEY) is not None:
            add_adapter(model, checkpoint[ADAPTER_KEY], seed=0)
    prefix = f"{role.name}."
    weights = {
        key.removeprefix(prefix): value
        for key, value in checkpoint["state_dict"].items()
        if key.startswith(prefix)
    }
    model.load_state_dict(weights)
    return model


def load_model(key: str, path: str, role: Role = POLICY) -> PreTrainedModel:
    """A model from a hub id, an exported folder or a Lightning checkpoint.

    Args:
        key: The configuration key that named it, for the error message.
        path: Hub id, folder, or `.ckpt` file.
        role: What it is for.

    Raises:
        ConfigurationError: If it is not there, or cannot play the role.
    """
    check_exists(key, path)
    if is_checkpoint(path):
        return model_from_checkpoint(read_checkpoint(path, role), role)
    try:
        return role.auto_class.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot load {path}: {_first_line(error)}", key=key) from None


def load_tokenizer(key: str, path: str, role: Role = POLICY) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, or the embedded review world's for `"grammar"`.

    A tokenizer without a padding token pads with its end-of-sequence token: masks, not ids, say what is
    padding here.

    Raises:
        ConfigurationError: If it is not there.
    """
    if path == GRAMMAR:
        return grammar_tokenizer()
    check_exists(key, path)
    if is_checkpoint(path):
        return tokenizer_from_files(read_checkpoint(path, role)[TOKENIZER_KEY])
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load a tokenizer from {path}: {_first_line(error)}", key=key
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The text files `save_pretrained` writes, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_text("utf-8") for file in sorted(Path(folder).iterdir())}


def tokenizer_from_files(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """The inverse of `tokenizer_files`."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, "utf-8")
        return AutoTokenizer.from_pretrained(folder)


def config_dict(model: PreTrainedModel) -> dict[str, Any]:
    """The model's configuration as plain numbers and strings, fit for a checkpoint."""
    return json.loads(model.config.to_json_string(use_diff=False))


def check_one_given(role: Role, config: dict[str, Any] | None, path: str | None) -> None:
    """A model has fresh weights or comes from somewhere.

    Raises:
        ConfigurationError: If both or neither is given.
    """
    if (config is None) == (path is None):
        raise ConfigurationError(
            f"give either {role.config_key} (fresh weights) or {role.name}_path, "
            f"got {role.config_key}={config} and {role.name}_path={path}"
        )


def fresh_model(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, role: Role = POLICY
) -> PreTrainedModel:
    """A randomly initialised model that fits the tokenizer: its vocabulary and special ids are taken over.

    Args:
        config: `model_type` and whatever else differs from that type's defaults.
        tokenizer: Gives `vocab_size`, `eos_token_id` and `pad_token_id`.
        seed: Decides the weights, whatever was drawn before.
        role: What it is for.
    """
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = {**config, **ids, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    with forked_rng(derive_seed(seed, "initial weights")):
        return model_from_config(settings, role)


def freeze(model: Module) -> Module:
    """Switch off dropout and gradients: a reference is read, never trained."""
    return model.eval().requires_grad_(False)


def export_checkpoint(ckpt_path: str, output_dir: str) -> None:
    """Write the policy of a checkpoint as a folder `transformers` loads by itself, an adapter merged into it.

    Raises:
        ConfigurationError: If the checkpoint is missing or holds no policy.
    """
    check_exists("ckpt_path", ckpt_path)
    checkpoint = read_checkpoint(ckpt_path)
    model = model_from_checkpoint(checkpoint)
    (merged(model) if has_adapter(model) else model).save_pretrained(output_dir)
    tokenizer_from_files(checkpoint[TOKENIZER_KEY]).save_pretrained(output_dir)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
