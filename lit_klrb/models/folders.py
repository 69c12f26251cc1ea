"""Checks of a folder before transformers reads it: where its files lie, and that they are whole."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import read_object, sha256, write_atomically

# The checksums of the weights, in the format of `sha256sum`.
CHECKSUMS = "SHA256SUMS"


def check_entries(key: str, folder: Path) -> None:
    """Check that the entries of a folder are files and folders, and that none is elsewhere.

    The cache of the hub consists of links to its own folder of contents, which are files of the model.
    """
    if folder.is_file():
        return
    root = folder.resolve()
    roots = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for entry in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        holds = f"{folder} holds {entry.name},"
        if not (entry.is_file() or entry.is_dir()):
            raise ConfigurationError(f"{holds} which is neither a file nor a folder", key=key)
        if entry.is_symlink() and not any(entry.resolve().is_relative_to(own) for own in roots):
            raise ConfigurationError(f"{holds} a link to a file elsewhere", key=key)


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
    lines = re.findall(r"([0-9a-f]{64})  (.+)", (folder / CHECKSUMS).read_text(errors="replace"))
    sums = {name: digest for digest, name in lines}
    for weights in _weights(folder):
        status = weights.stat()
        if sums.get(weights.name) != _sum_of(weights, status.st_size, status.st_mtime_ns):
            raise ConfigurationError(
                f"{weights.name} does not match its checksum in {CHECKSUMS}: it is damaged, or was changed "
                f"after the export; then delete {CHECKSUMS}"
            )


@cache
def _sum_of(weights: Path, size: int, changed: int) -> str:
    """The checksum of a file as it is, once for policy and reference of one folder."""
    return sha256(weights)


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


def has_weight_files(folder: Path) -> bool:
    """Whether a folder has files of weights."""
    return any(file for suffix in ("safetensors", "bin") for file in folder.glob(f"*.{suffix}"))


def check_device(name: str) -> None:
    """Check that this machine has a device."""
    # torch without CUDA asserts
    with refusing(f"{name} cannot be used", RuntimeError, AssertionError, key="device"):
        torch.empty(0, device=name)


def check_no_kernels(config: Mapping[str, Any]) -> None:
    """Check that no setting of a model's configuration, at any depth, names a kernel to be downloaded."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_no_kernels(value)
        elif "_implementation" in str(key) and "/" in str(value):
            raise ConfigurationError(f"{key}: {value} is code to be downloaded")
