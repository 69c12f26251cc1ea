"""Loading models and tokenizers from a hub id, a folder, a GGUF file or a Lightning checkpoint.

Only weights, settings and text are loaded, never code; see docs/security.md.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, logging
from transformers.utils.peft_utils import find_adapter_config_file

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError, concerning, refusing
from lit_klrb.files import local_path, read_object
from lit_klrb.models import gguf
from lit_klrb.models.checkpoints import (
    ADAPTER_KEY as ADAPTER_KEY,
    END_TOKENS_KEY as END_TOKENS_KEY,
    TOKEN_VALUES_KEY as TOKEN_VALUES_KEY,
    TOKENIZER_KEY as TOKENIZER_KEY,
    model_from_checkpoint as model_from_checkpoint,
    read_checkpoint as read_checkpoint,
)
from lit_klrb.models.dry_run import PlannedModel, current_dry_run, without_weights
from lit_klrb.models.folders import check_entries, check_no_kernels, check_weights
from lit_klrb.models.roles import (
    CLASSIFIER as CLASSIFIER,
    POLICY as POLICY,
    Role as Role,
    check_predicts,
    check_settings,
    config_dict as config_dict,
    fuse_activations,
    model_from_config,
    other_shape,
)
from lit_klrb.models.tokenizers import (
    check_rows,
    tokenizer_files as tokenizer_files,
    tokenizer_from_files as tokenizer_from_files,
    tokenizer_from_folder,
)
from lit_klrb.seeding import derive_seed, forked_rng

Module = TypeVar("Module", bound=nn.Module)

GRAMMAR = "grammar"
# As the path of a reference: the policy itself, with a stopped gradient.
ITSELF = "policy"
# The index of a layer in the name of a weight.
NUMBER = re.compile(r"\.\d+\.")
# The largest new model, in weights, that a dry run builds and checks.
TRIED = 2**24
# Prefixes of the weights of transformers' classification heads.
CLASSIFIER_HEADS = ("score.", "classifier.", "classification_head.")


def silence() -> None:
    """Turn off transformers' warnings and progress bars; problems raise errors instead."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def is_checkpoint(path: str) -> bool:
    """Whether `path` names a Lightning checkpoint rather than a folder or a hub id."""
    return path.endswith(".ckpt")


def is_file(path: str) -> bool:
    """Whether `path` names a checkpoint or a GGUF file, rather than a folder or a hub id."""
    return path.endswith((".ckpt", gguf.SUFFIX))


def looks_local(path: str) -> bool:
    """Whether `path` is a local path rather than a hub id, which is `name` or `owner/name`."""
    return is_file(path) or Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1


def check_exists(key: str, path: str) -> None:
    """Check that a path is not empty and, if local, a file or a folder; hub ids pass."""
    if not path:
        problem = "'' is not a path; a hub id, a folder, a .gguf file or a checkpoint is expected"
        raise ConfigurationError(problem, key=key)
    if not looks_local(path):
        return
    local = local_path(path, key)
    if not local.exists():
        raise ConfigurationError(f"{path} does not exist", key=key)
    if not local.is_file() and (is_file(path) or not local.is_dir()):
        raise ConfigurationError(f"{path} is not a file", key=key)
    check_entries(key, local)


@contextmanager
def errors_of(key: str, path: str) -> Iterator[None]:
    """Convert every exception inside the block to a `ConfigurationError` about the argument `key`."""
    check_exists(key, path)
    missing = "is no folder here, and as a hub id " * (not looks_local(path))
    problem = f"{missing}cannot be loaded"
    with concerning(path, key=key), refusing(problem):  # libraries raise all kinds of exceptions
        yield


@contextmanager
def reading(key: str, path: str) -> Iterator[str]:
    """The place from which transformers reads a model; exceptions inside the block name the argument `key`.

    Yields:
        The hub id, or the path with `~` expanded; the converted folder of a GGUF file.
    """
    with errors_of(key, path):
        file = gguf.gguf_file(path)
        yield str(local_path(path)) if file is None else gguf.as_folder(file)


def load(key: str, path: str, role: Role = POLICY) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, all of whose tokens have a row of the embedding."""
    model, tokenizer = load_model(key, path, role), load_tokenizer(key, path, role)
    with concerning(path, key=key):
        check_rows(model, tokenizer)
    return model, tokenizer


def load_model(key: str, path: str, role: Role = POLICY) -> PreTrainedModel:
    """Load a model from a hub id, an exported folder, a GGUF file or a Lightning checkpoint."""
    planned, dry_run = _planned(path), current_dry_run()
    with reading(key, path) as local:
        if planned is not None:
            model = planned.model
            if planned.role != role.name:
                raise ConfigurationError(f"will contain no {role.name}, but a {planned.role}")
        elif is_checkpoint(path):
            model = model_from_checkpoint(read_checkpoint(local, role), role)
        else:
            model = _model_from_folder(local, role)
        check_predicts(None, model, role)
    if dry_run is not None:
        size = getattr(model.config, "vocab_size", None)
        dry_run.models[key] = {"type": model.config.model_type, "vocabulary": size, "path": path}
    return model


def _planned(path: str) -> PlannedModel | None:
    """In a dry run, the model of a checkpoint that another run of the plan will write; None otherwise."""
    dry_run = current_dry_run()
    return None if dry_run is None else dry_run.planned(path, looks_local(path))


def read_folder(path: str, role: Role, **settings: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model from a folder or a hub id, and its missing, unexpected and mismatched weights."""
    if find_adapter_config_file(path) is not None:
        # Loading it would download the model that it names
        merge = "from peft import AutoPeftModelForCausalLM as A; import sys; "
        merge += "A.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[2])"
        command = f'python -c "{merge}" {shlex.quote(path)} MERGED'
        remedy = f"{command}, and copy the tokenizer's files of its model to MERGED"
        raise ConfigurationError(f"this is an adapter; merge it into its model first: {remedy}")
    check_weights(Path(path))
    check_no_kernels(read_object(Path(path) / CONFIG_NAME))
    _check_not_quantised(AutoConfig.from_pretrained(path, trust_remote_code=False))
    if current_dry_run() is not None:
        nothing = dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys"), ())
        return without_weights(path, role, settings), nothing
    model, info = role.auto_class.from_pretrained(
        path, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **settings
    )
    fuse_activations(model)
    return model, info


def _check_not_quantised(config: PreTrainedConfig) -> None:
    settings = getattr(config, "quantization_config", None) or {}
    if method := settings.get("quant_method"):
        bits = next((n for n in (4, 8) if settings.get(f"load_in_{n}bit")), settings.get("bits"))
        by = f"{method}, {bits} bits" if bits else method
        raise ConfigurationError(
            f"its weights are quantised ({by}), which is not supported: name the original"
        )


def _model_from_folder(path: str, role: Role) -> PreTrainedModel:
    """The model of a folder or a hub id; refused if weights are missing, which would be random."""
    model, info = read_folder(path, role)
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(f"not a {role.name}: it has no weights for {', '.join(missing[:3])}")
    if mismatched := sorted(info["mismatched_keys"]):
        raise other_shape(*mismatched[0])
    layers = {NUMBER.sub(".N.", name) for name in model.state_dict()}
    for name in sorted(info["unexpected_keys"]):
        if NUMBER.search(name) and any(known.endswith(NUMBER.sub(".N.", name)) for known in layers):
            raise ConfigurationError(f"its configuration has no layer for the weight {name}")
    # A language model whose head is tied to the embedding misses no weight in the files of a classifier
    heads = sorted(name for name in info["unexpected_keys"] if name.startswith(CLASSIFIER_HEADS))
    if heads:
        raise ConfigurationError(f"not a {role.name}: it has the weights of a classifier, {heads[0]}")
    return model


def load_tokenizer(key: str, path: str, role: Role = POLICY) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, or that of the embedded review world for `"grammar"`.

    A tokenizer without a padding token pads with its end-of-sequence token: padding is identified by masks,
    not by ids.
    """
    if path == GRAMMAR:
        return grammar_tokenizer()
    if (planned := _planned(path)) is not None:
        return planned.tokenizer
    with reading(key, path) as local:
        if is_checkpoint(path):
            return tokenizer_from_files(read_checkpoint(local, role).get(TOKENIZER_KEY))
        tokenizer = tokenizer_from_folder(local)
        tokenizer_files(tokenizer)  # raise now rather than when the first checkpoint is written
        if tokenizer.eos_token_id is None and (role == POLICY or tokenizer.pad_token_id is None):
            raise ConfigurationError("its tokenizer has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def load_token_values(key: str, path: str) -> Tensor | None:
    """The token values in the checkpoint of a warm start, shape [V]; None without any."""
    if not is_checkpoint(path) or _planned(path) is not None:
        return None
    with reading(key, path) as local:
        values: Tensor | None = read_checkpoint(local).get(TOKEN_VALUES_KEY)
        return values


def check_one_given(role: Role, config: dict[str, Any] | None, path: str | None) -> None:
    """Check that either a configuration for fresh weights or a path is given."""
    if (config is None) == (path is None):
        new, path_key = role.config_key, f"{role.name}_path"
        either = f"give either {new} (fresh weights) or {path_key}"
        raise ConfigurationError(f"{either}, got {new}={config} and {path_key}={path}")


def fresh_model(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, role: Role = POLICY
) -> PreTrainedModel:
    """A randomly initialised model with the vocabulary and the special tokens of a tokenizer.

    The configuration has `model_type` and the settings that differ from that type's defaults; the global
    random state has no influence.
    """
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    given = {**ids, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    check_settings(config, given, role)

    def build() -> PreTrainedModel:
        with forked_rng(derive_seed(seed, "initial weights")):
            return model_from_config({**config, **given}, role)

    if current_dry_run() is not None:
        with torch.device("meta"):
            model = build()
        if model.num_parameters() > TRIED:
            return model
    model = build()
    check_predicts(role.config_key, model, role)
    return model


def freeze(model: Module) -> Module:
    """Switch off dropout and gradients, for a reference."""
    return model.eval().requires_grad_(False)
