"""Models from Lightning checkpoints of this package, which may come from an untrusted source.

A checkpoint is self-contained: it has the weights, the model's configuration and the tokenizer's files, so it
can be loaded, exported or trained further anywhere. Reading one runs no code and writes no file; see
docs/security.md.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import read_object
from lit_klrb.models.adapters import stored_adapter
from lit_klrb.models.roles import POLICY, Role, model_from_config, other_shape, without_code
from lit_klrb.run.checkpoints import digest, read
from lit_klrb.run.directory import published_result
from lit_klrb.seeding import forked_rng

TOKENIZER_KEY, ADAPTER_KEY, TOKEN_VALUES_KEY = "tokenizer_files", "adapter", "token_values"
END_TOKENS_KEY = "end_tokens"


def read_checkpoint(path: str, role: Role = POLICY) -> dict[str, Any]:
    """Load a Lightning checkpoint on the CPU, without running pickled code.

    Raises:
        ConfigurationError: If it cannot be read, contains no model for the role, or belongs to a published
            cell of a sweep and has other weights than those of the result.
    """
    status = os.stat(path)
    checkpoint = _checked(Path(path).resolve(), (status.st_ino, status.st_mtime_ns, status.st_size))
    if role.config_key not in checkpoint:
        raise ConfigurationError(
            f"contains no {role.name}: it was not written by a lit_klrb module that has one"
        )
    return dict(checkpoint)


@lru_cache(maxsize=2)
def _checked(path: Path, state: tuple[int, int, int]) -> dict[str, Any]:
    """The content of a file, read once for weights, tokenizer and token values of policy and reference.

    Args:
        path: The file.
        state: Which file it is, by inode, time and size: another one at the same path is read again.
    """
    checkpoint = read(path, mmap=True)  # with the optimizer's moments, which models do not need
    _check_published(path, checkpoint)
    return checkpoint


def model_from_checkpoint(checkpoint: dict[str, Any], role: Role = POLICY) -> PreTrainedModel:
    """The model in a checkpoint, with its weights."""
    config, weights = _by_name(checkpoint, role.config_key), _weights(checkpoint, role)
    adapter = None if checkpoint.get(ADAPTER_KEY) is None else _by_name(checkpoint, ADAPTER_KEY)

    config = without_code(config)

    def build() -> PreTrainedModel:
        model = model_from_config(config, role)
        return model if adapter is None else stored_adapter(model, adapter, weights)

    # Check the shapes on a model without weights, whose errors name the weight
    with torch.device("meta"):
        _check_weights(weights, build().state_dict())
    with forked_rng(0):  # the random initial weights are overwritten
        model = build()
    model.load_state_dict(weights)
    if (ends := checkpoint.get(END_TOKENS_KEY)) and model.generation_config is not None:
        model.generation_config.eos_token_id = ends
    return model


def _check_published(path: Path, checkpoint: dict[str, Any]) -> None:
    """Check the last checkpoint of a published cell against its result, if that has a digest."""
    result = published_result(path.parent.parent)
    if result is None or path != path.parent.parent / schema.CHECKPOINT:
        return
    if not (published := read_object(result)):
        raise ConfigurationError(f"its published result cannot be read: {result}")
    expected, weights = published.get(schema.WEIGHTS), _by_name(checkpoint, "state_dict")
    if expected is not None and digest(weights) != expected:
        raise ConfigurationError(f"its weights are not those of its published result, {result}")


def _by_name(checkpoint: dict[str, Any], key: str) -> dict[str, Any]:
    """An entry that must be a dictionary with strings as keys."""
    entry = checkpoint.get(key)
    if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
        problem = f"must be a dictionary with strings as keys, got {type(entry).__name__}"
        raise ConfigurationError(problem, key=key)
    return entry


def _weights(checkpoint: dict[str, Any], role: Role) -> dict[str, Tensor]:
    """The model's entries of the state dict, without the role's prefix."""
    prefix = f"{role.name}."
    state = _by_name(checkpoint, "state_dict")
    weights = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise ConfigurationError(f"the weight {name} is not a tensor")
        if not value.isfinite().all():
            raise ConfigurationError(f"the weight {name} has values that are not finite")
    return weights


def _check_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in sorted(weights.keys() ^ expected.keys()):
        problem = "is missing" if name in expected else "belongs to no layer of its configuration"
        raise ConfigurationError(f"the weight {name} {problem}")
    for name, value in expected.items():
        if weights[name].shape != value.shape:
            raise other_shape(name, weights[name].shape, value.shape)
