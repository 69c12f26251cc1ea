"""Limits of what a configuration may ask for: a model is no larger than the file that holds its weights."""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from transformers.utils import CONFIG_NAME

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import LARGEST, parse_object, read_regular

# Numbers of a configuration that do not size a model: bases and lengths of positions, ids of tokens.
NOT_SIZES = re.compile(r"theta|base|window|length|_id(s|_|$)|seed|positions?_embeddings|factor|scal")
# Numbers of layers.
LAYERS = re.compile(r"^(n|num|encoder|decoder)(_[a-z]+)*_layers?$")
# What even a small file may ask for: a table of labels or a list with an entry for each layer.
SMALL = 2**20


class Size(NamedTuple):
    """What a file of weights holds."""

    tensors: int
    bytes: int


def size_of_folder(folder: Path) -> Size:
    """The number of tensors in a folder's weights, and their size in bytes.

    Pickled weights do not say how many they are; each takes more than a hundred bytes.
    """
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    sizes = [file.stat().st_size for file in files]
    counts = [_count(file) if file.suffix == ".safetensors" else file.stat().st_size // 100 for file in files]
    return Size(sum(counts), sum(sizes))


def check_device(name: str) -> None:
    """Check that this machine has a device."""
    # torch without CUDA asserts
    with refusing(f"{name} cannot be used", RuntimeError, AssertionError, key="device"):
        torch.empty(0, device=name)


def check_numbers(config: Mapping[str, Any], size: Size) -> None:
    """Check that a configuration has no number larger than its model, no layers below 0 and no kernels."""
    largest = max(SMALL, 8 * size.bytes)  # a byte holds at most as many weights
    for key, value in config.items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                check_numbers(part, size)
            elif type(part) is int and part < 0 and LAYERS.search(str(key)):
                raise ConfigurationError(f"{key}: must be at least 0, got {part}")
            elif type(part) is int and part > largest and not NOT_SIZES.search(str(key)):
                raise ConfigurationError(f"{key}: {part} is more than weights of {size.bytes} bytes hold")
            elif "_implementation" in str(key) and "/" in str(part):
                raise ConfigurationError(f"{key}: {part} is code to be downloaded")


@contextmanager
def at_most(size: Size) -> Iterator[None]:
    """Stop the construction of a model that has more weights than a file."""
    left = [2 * size.tensors + 1000, 8 * size.bytes + 2**24]

    def count(_: nn.Module, name: str, value: Tensor | None) -> None:
        left[0] -= 1
        left[1] -= 0 if value is None else value.numel()
        if min(left) < 0:
            raise ConfigurationError(
                f"its configuration makes more weights than its file has, {size.tensors}"
            )

    with registration.register_module_parameter_registration_hook(count):
        yield


@contextmanager
def limited(path: str) -> Iterator[None]:
    """Stop the construction of a model that is larger than the weights in its folder."""
    folder = Path(path)
    if not folder.is_dir():  # a hub id, whose files are not here yet
        yield
        return
    size = size_of_folder(folder)
    if (folder / CONFIG_NAME).is_file():
        check_numbers(json.loads(read_regular(folder / CONFIG_NAME)), size)
    with at_most(size):
        yield


def _count(path: Path) -> int:
    """The number of tensors in a file of safetensors; 0 if it is damaged."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        return len(parse_object(file.read(min(length, LARGEST))))
