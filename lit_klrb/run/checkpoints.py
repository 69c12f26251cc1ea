"""Checkpoint files, which are written atomically and checked when they are read."""

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lit_klrb import schema
from lit_klrb.distributed import whole
from lit_klrb.errors import ConfigurationError, concerning, refusing
from lit_klrb.files import PARTIAL, damage as damage, sync, write_beside


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints atomically, keeps the previous one, and checks checkpoints that it reads.

    Lightning's own class uses a temporary file in `$TMPDIR`. If that is on another file system, a kill can
    leave an incomplete checkpoint under its final name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replace the checkpoint atomically; the old `last.ckpt` becomes `previous.ckpt`."""
        target = Path(path)
        partial = write_beside(target, lambda file: _save(checkpoint, file))
        if target.name == Path(schema.CHECKPOINT).name and target.exists():
            _keep(target, previous_of(target))
        partial.replace(target)
        sync(target.parent)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Check and read a checkpoint."""
        with concerning(path, key="ckpt_path"):
            check_intact(Path(path))
            content: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return content


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint without a copy in memory."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # what torch says of a full disk
            raise error.__context__ from None
        raise


def read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Load a checkpoint on the CPU, without running pickled code.

    Raises:
        ConfigurationError: If it is damaged or not a checkpoint; without the path, which the caller adds.
    """
    check_intact(path)
    with (
        refusing("not a checkpoint"),
        warnings.catch_warnings(),
    ):  # damaged files raise exceptions of all kinds
        # A note on the time that a check of sparse tensors takes, which would be shown as the reason
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        try:
            content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            raise ConfigurationError(
                "damaged, or made of Python objects: loading those could run code"
            ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"not a checkpoint: it contains a {type(content).__name__}")
    return content


# What Lightning restores, and would leave out without an error. A checkpoint with weights only lacks some.
PARTS = ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "global_step", "epoch")


def check_resumable(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint has all that a resumed run restores.

    Raises:
        ConfigurationError: If it lacks a part.
    """
    missing = [name for name in PARTS if name not in checkpoint]
    if missing:
        problem = f"{path} cannot be resumed: it lacks {', '.join(missing)}"
        raise ConfigurationError(
            f"{problem}; policy_path starts another run from its policy", key="ckpt_path"
        )


def previous_of(checkpoint: Path) -> Path:
    """The path of the previous checkpoint."""
    return checkpoint.with_name(Path(schema.PREVIOUS_CHECKPOINT).name)


def last_intact(run: Path) -> str | None:
    """The newest checkpoint of a run directory that is not damaged; None without one."""
    last = run / schema.CHECKPOINT
    intact = (path for path in (last, previous_of(last)) if path.is_file() and damage(path) is None)
    return next(map(str, intact), None)


def check_intact(path: Path) -> None:
    """Check that a checkpoint is not damaged.

    Raises:
        ConfigurationError: If it is; names the previous checkpoint if that is intact.
    """
    problem, previous = damage(path), previous_of(path)
    if problem is None:
        return
    if previous != path and previous.is_file() and damage(previous) is None:
        problem += f"; the previous one is intact: {previous}"
    raise ConfigurationError(problem)


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and bytes of tensors, independent of how they are stored."""
    result = hashlib.sha256()
    for name, value in state.items():
        result.update(name.encode())
        result.update(whole(value).detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def _keep(path: Path, other: Path) -> None:
    """Give a file a second name, by a hard link if possible, so that it never loses the first."""
    spare = other.with_name(f".{other.name}{PARTIAL}")
    spare.unlink(missing_ok=True)
    try:
        os.link(path, spare)
    except OSError:
        path.replace(other)
        return
    spare.replace(other)
    # If both names are links to the same file, replace does nothing and leaves the spare name
    spare.unlink(missing_ok=True)
