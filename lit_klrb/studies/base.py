"""Base classes of studies: when they measure, their prompts, and their artifact of plain numbers."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lit_klrb import schema
from lit_klrb.data.batches import Batch
from lit_klrb.distributed import sharding_mesh
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_atomically
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.seeding import derive_seed

# The coarsest unit of an entry of a Gram matrix, as a fraction of the norms. Rounding to it makes errors of
# about 1e-6 of the norms; those of float32 gradients are as large.
_GRAM_PRECISION = 1e-5


def require_rollouts(callback: L.Callback, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
    """Check that the module has rollouts and the command trains."""
    name = f"trainer.callbacks: {type(callback).__name__}"
    if not isinstance(module, OnPolicyModule):
        raise ConfigurationError(f"{name} measures rollouts, but {type(module).__name__} has none")
    if stage != "fit" and not trainer.global_step:  # steps were made if this is the evaluation after a fit
        raise ConfigurationError(f"{name} measures training, but this command does not train; use fit")
    if sharding_mesh(trainer) is not None:
        raise ConfigurationError(f"{name} needs whole models, which fsdp2 divides")


class PolicyStudy(L.Callback, ABC):
    """Measures the policy at several points of an on-policy run, each a snapshot in the artifact.

    Training is not affected: a study samples its own prompts and completions, with its own seeds. It writes
    RUN/studies/NAME.json; a resumed run appends to it.

    Args:
        at: When to measure, as fractions of the run's steps: 0 before the first, 1 after the last.
    """

    name: ClassVar[str]
    needs = (0, 0)  # batches of training prompts and their size, if these are known before it measures
    needs_reference = True  # all of its logits, which a served teacher does not send

    def __init__(self, at: Sequence[float]) -> None:
        if not at or not all(0 <= fraction <= 1 for fraction in at):
            problem = f"at takes fractions of the run in [0, 1], got {at}"
            raise ConfigurationError(f"{type(self).__name__}: {problem}")
        self.at = sorted(at)
        self._due: list[int] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the module has rollouts and the command trains."""
        require_rollouts(self, trainer, pl_module, stage)

    @property
    @abstractmethod
    def design(self) -> dict[str, Any]:
        """Settings that all snapshots share, for the artifact."""

    @abstractmethod
    def measure(self, trainer: L.Trainer, module: OnPolicyModule) -> dict[str, Any]:
        """Measure the current policy and return the content of a snapshot."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine the steps of the snapshots; a resumed run has the earlier ones in its artifact."""
        rows: Any = trainer.train_dataloader
        self.check_prompts(len(rows.dataset), *self.needs)
        steps = [round(fraction * trainer.max_steps) for fraction in self.at]
        self._due = [step for step in steps if step >= trainer.global_step]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take a snapshot if one is due."""
        self._take_snapshot(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Take a snapshot of the trained policy if one is due."""
        self._take_snapshot(trainer, pl_module)

    def _take_snapshot(self, trainer: L.Trainer, module: OnPolicyModule) -> None:
        if self._due[:1] != [trainer.global_step]:
            return
        step = self._due.pop(0)
        module.print(f"step {step}: study of {self.name.replace('_', ' ')}")
        with torch.enable_grad(), module.computing():
            snapshot = {"step": step, **self.measure(trainer, module)}
        path = Path(trainer.default_root_dir) / schema.STUDIES / f"{self.name}.json"
        if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        before = json.loads(path.read_text())["snapshots"] if path.exists() else []
        snapshots = [*(earlier for earlier in before if earlier["step"] < step), snapshot]
        artifact = {"schema": schema.STUDY_SCHEMA, **self.design, "snapshots": snapshots}
        write_atomically(path, json.dumps(artifact) + "\n")

    def check_prompts(self, available: int, batches: int, size: int) -> None:
        """Check that there are so many training prompts."""
        if batches * size > available:
            needs = f"needs {batches} × {size} training prompts, got {available}"
            raise ConfigurationError(f"{type(self).__name__}: {needs}")

    def prompts(self, trainer: L.Trainer, module: OnPolicyModule, batches: int, size: int) -> list[Batch]:
        """Batches of distinct training prompts, the same at every snapshot."""
        loader: Any = trainer.train_dataloader
        self.check_prompts(len(loader.dataset), batches, size)
        generator = torch.Generator().manual_seed(derive_seed(module.seed, self.name, "prompts"))
        order = torch.randperm(len(loader.dataset), generator=generator)[: batches * size]
        chosen = order.view(batches, size).tolist()
        collated = [loader.collate_fn([loader.dataset[i] for i in part]) for part in chosen]
        return [move_data_to_device(batch, module.device) for batch in collated]


def rounded(values: Tensor, digits: int) -> Any:
    """A tensor as nested lists of numbers, rounded to `digits` significant digits.

    Example:
        >>> import torch
        >>> rounded(torch.tensor([[1 / 3, 2.0]]), digits=4)
        [[0.3333, 2.0]]
    """
    if values.ndim:
        return [rounded(value, digits) for value in values]
    return float(f"{values.item():.{digits}g}")


def lower_triangle(gram: Tensor) -> list[list[float]]:
    """The lower triangle of a Gram matrix, row by row, without the digits that gradients do not have.

    Example:
        >>> import torch
        >>> lower_triangle(torch.tensor([[400.0, 1 / 3], [1 / 3, 4.0]], dtype=torch.float64))
        [[400.0], [0.3333, 4.0]]
    """
    norms = gram.diagonal().sqrt()
    units = _GRAM_PRECISION * norms[:, None] * norms
    places = torch.where(units > 0, -units.log10().floor(), 0.0).nan_to_num().int().tolist()
    return [
        [
            round(value, digits) if math.isfinite(value) else value
            for value, digits in zip(row[: i + 1], places[i], strict=False)
        ]
        for i, row in enumerate(gram.tolist())
    ]
