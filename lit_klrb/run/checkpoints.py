"""Checkpoint files: written whole or not at all, checked when they are read."""

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError, brief
from lit_klrb.files import PARTIAL, sync, write_beside


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it; keeps the one before; checks what it reads.

    Lightning's own goes through a temporary file in `$TMPDIR`. Where that is another file system, a kill
    leaves a torn checkpoint under its final name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replace the checkpoint at once; `last.ckpt` becomes `previous.ckpt`."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        target = Path(path)
        partial = write_beside(target, buffer.getbuffer())
        if target.name == Path(schema.CHECKPOINT).name and target.exists():
            _keep(target, previous_of(target))
        partial.replace(target)
        sync(target.parent)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint that is whole.

        Raises:
            ConfigurationError: If it is damaged.
        """
        try:
            check_intact(Path(path))
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}", key="ckpt_path") from error
        return super().load_checkpoint(path, map_location, weights_only)


def read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's content, on the CPU and without running any pickled code.

    Args:
        path: A file written by `torch.save`.
        mmap: Read tensors when they are used.

    Raises:
        ConfigurationError: If it is damaged, or no checkpoint; without the path, which the caller adds.
    """
    check_intact(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            "damaged, or made of Python objects: loading those could run code"
        ) from error
    except Exception as error:  # damaged bytes raise whatever they are taken for
        raise ConfigurationError(f"not a checkpoint: {brief(error)}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"not a checkpoint: it holds a {type(content).__name__}")
    return content


def previous_of(checkpoint: Path) -> Path:
    """Where the checkpoint before the newest one is kept."""
    return checkpoint.with_name(Path(schema.PREVIOUS_CHECKPOINT).name)


def check_intact(path: Path) -> None:
    """Refuse a damaged checkpoint.

    Raises:
        ConfigurationError: What is wrong with it, and which other one is whole.
    """
    problem, previous = damage(path), previous_of(path)
    if problem is None:
        return
    if previous != path and previous.is_file() and damage(previous) is None:
        problem += f"; the one before it is whole: {previous}"
    raise ConfigurationError(problem)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's bytes; None if nothing is.

    A checkpoint is a zip archive with a CRC-32 of each record, which `torch.load` does not look at.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # torch stores every record once and as it is.
            if sum(record.file_size for record in archive.infolist()) > path.stat().st_size:
                return "not a checkpoint: it would unpack to more than its size"
            record = archive.testzip()
    except zipfile.BadZipFile:
        return "not a checkpoint, or one that is cut off"
    except Exception as error:  # damaged headers raise whatever they are taken for
        return f"not a checkpoint: {brief(error)}"
    return record and f"damaged: {record} does not match its checksum"


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and bytes of tensors: the same for the same weights, wherever they are kept."""
    result = hashlib.sha256()
    for name, value in state.items():
        result.update(name.encode())
        result.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def _keep(path: Path, other: Path) -> None:
    """Give the file a second name. It never is without the first, where the file system has hard links."""
    spare = other.with_name(f".{other.name}{PARTIAL}")
    spare.unlink(missing_ok=True)
    try:
        os.link(path, spare)
    except OSError:
        path.replace(other)
        return
    spare.replace(other)
    # Renaming a file to another name that it already has does nothing.
    spare.unlink(missing_ok=True)
