"""Results that take long to make and depend on nothing but their key, kept on disk."""

import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lit_klrb.run.files import write_atomically

T = TypeVar("T")
# To be raised whenever the same key would give another result.
FORMAT = 1


def default_folder() -> Path:
    """`LIT_KLRB_CACHE`, or lit_klrb in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("LIT_KLRB_CACHE") or Path(home) / "lit_klrb").expanduser()


def cached(name: str, key: Any, make: Callable[[], T]) -> T:
    """The result of `make`, from disk if it was made before with the same key.

    Args:
        name: What it is, the beginning of the file's name.
        key: All that the result depends on, as plain numbers, strings, lists and dictionaries.
        make: Makes it, of tensors, numbers, strings, lists and tuples; again if its file cannot be read.
    """
    digest = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()
    path = default_folder() / f"{name}-{digest[:32]}.pt"
    try:
        found: T = torch.load(path, weights_only=True)
    except Exception:  # not there, or torn by something else than us
        found = make()
        buffer = io.BytesIO()
        torch.save(found, buffer)
        write_atomically(path, buffer.getvalue())
    return found


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 of a model's configuration, and of the names and bytes of all its weights."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
