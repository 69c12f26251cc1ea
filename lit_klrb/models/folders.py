"""Checks of a folder before transformers reads it: its files, and what its configuration asks for."""

import json
import os
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
from lit_klrb.files import LARGEST, parse_object, read_object, read_regular, sha256, write_atomically

# Numbers of a configuration that do not size a model: bases and lengths of positions, ids of tokens.
NOT_SIZES = re.compile(r"theta|base|window|length|_id(s|_|$)|seed|positions?_embeddings|factor|scal")
# Numbers of layers.
LAYERS = re.compile(r"^(n|num|encoder|decoder)(_[a-z]+)*_layers?$")
# What even a small file may ask for: a table of labels or a list with an entry for each layer.
SMALL = 2**20
# The checksums of the weights, in the format of `sha256sum`.
CHECKSUMS = "SHA256SUMS"
# Maximum number of characters that are read of them; a model of a thousand files has 100,000.
MAX_CHARACTERS = 2**20
# Suffixes of files that are read as a whole and parsed.
TEXTS = {".json", ".txt", ".jinja", ".model"}


def check_entries(key: str, place: Path) -> None:
    """Check that the entries of a folder are files and folders of bounded size, and that none is elsewhere.

    The cache of the hub consists of links to its own folder of contents, which are files of the model.
    """
    if place.is_file():
        _check_size(key, place)
        return
    root = place.resolve()
    roots = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for entry in (*place.iterdir(), *place.glob("additional_chat_templates/*")):
        holds = f"{place} holds {entry.name},"
        if not (entry.is_file() or entry.is_dir()):
            raise ConfigurationError(f"{holds} which is neither a file nor a folder", key=key)
        if entry.is_symlink() and not any(entry.resolve().is_relative_to(own) for own in roots):
            raise ConfigurationError(f"{holds} a link to a file elsewhere", key=key)
        if entry.is_file():
            _check_size(key, entry)


def _check_size(key: str, path: Path) -> None:
    """Check that a file is not larger than this machine's memory, and one of settings not than any in use."""
    size = path.stat().st_size
    largest = LARGEST if path.suffix in TEXTS else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > largest:
        raise ConfigurationError(f"{path} has {size} bytes; at most {largest} are read", key=key)


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's weights, which `sha256sum --check SHA256SUMS` verifies, too."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in _weights(folder)]
    write_atomically(folder / CHECKSUMS, "".join(lines))


def check_weights(folder: Path) -> None:
    """Check that all weights are files of a folder, and match their checksums if it has any."""
    for index in folder.glob("*.index.json"):
        _check_index(index)
    if not (folder / CHECKSUMS).is_file():
        return
    with (folder / CHECKSUMS).open(errors="replace") as file:
        lines = re.findall(r"([0-9a-f]{64})  (.+)", file.read(MAX_CHARACTERS))
    sums = {name: digest for digest, name in lines}
    for weights in _weights(folder):
        if sums.get(weights.name) != sha256(weights):
            raise ConfigurationError(
                f"{weights.name} does not match its checksum in {CHECKSUMS}: it is damaged, or was changed "
                f"after the export; then delete {CHECKSUMS}"
            )


def _check_index(path: Path) -> None:
    """Check that an index names files of its folder: transformers would read any other, pipes too."""
    names = read_object(path).get("weight_map")
    if not isinstance(names, dict):
        raise ConfigurationError(f"{path.name} is not an index of weights")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not (path.parent / name).is_file():
            raise ConfigurationError(f"{path.name} names {name!r}, which is not a file of this folder")


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


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
