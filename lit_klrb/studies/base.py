"""When a study looks, at which prompts, and where it leaves what it saw."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.rloo import OnPolicyModule
from lit_klrb.run.files import write_atomically
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.rollouts import require_rollouts

Batch = dict[str, Tensor]


class PolicyStudy(L.Callback, ABC):
    """Measures the policy at moments of a run of `RLOOModule`, on completions of its own.

    The training is not touched: prompts and completions have seeds of their own. RUN/studies/NAME.json holds
    the moments; a resumed run goes on with it.

    Args:
        at: Moments, as shares of the run's steps: 0 before the first, 1 after the last.
    """

    name: ClassVar[str]

    def __init__(self, at: Sequence[float]) -> None:
        if not at or not all(0 <= share <= 1 for share in at):
            raise ConfigurationError(f"{type(self).__name__}: at takes shares of the run in [0, 1], got {at}")
        self.at = sorted(at)
        self._due: list[int] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts, and a command that does not train."""
        require_rollouts(self, trainer, pl_module, stage)

    @property
    @abstractmethod
    def design(self) -> dict[str, Any]:
        """What all moments share, as it stands in the artifact."""

    @abstractmethod
    def measure(self, trainer: L.Trainer, module: OnPolicyModule) -> dict[str, Any]:
        """What is seen now, for the artifact."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Which steps to look at: a resumed run has those before its own in the artifact."""
        steps = [round(share * trainer.max_steps) for share in self.at]
        self._due = [step for step in steps if step >= trainer.global_step]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look, if it is time."""
        if self._due and self._due[0] == trainer.global_step:
            self._look(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Look at the trained policy."""
        if self._due and self._due[0] == trainer.global_step:
            self._look(trainer, pl_module)

    def _look(self, trainer: L.Trainer, module: OnPolicyModule) -> None:
        step = self._due.pop(0)
        module.print(f"step {step}: study of {self.name.replace('_', ' ')}")
        with torch.enable_grad():
            moment = {"step": step, **self.measure(trainer, module)}
        path = Path(trainer.default_root_dir) / schema.STUDIES / f"{self.name}.json"
        if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        before = json.loads(path.read_text())["moments"] if path.exists() else []
        moments = [*(earlier for earlier in before if earlier["step"] < step), moment]
        write_atomically(path, json.dumps({"schema": 1, **self.design, "moments": moments}) + "\n")

    def prompts(self, trainer: L.Trainer, module: OnPolicyModule, batches: int, size: int) -> list[Batch]:
        """Batches of training prompts, none of them twice; the same at every moment.

        Args:
            trainer: Has the training prompts.
            module: Gives seed and device.
            batches: How many batches.
            size: Prompts in each.

        Raises:
            ConfigurationError: If there are not so many prompts.
        """
        loader: Any = trainer.train_dataloader
        if batches * size > len(loader.dataset):
            raise ConfigurationError(
                f"{type(self).__name__}: {batches} × {size} prompts are asked for, and train_size leaves "
                f"{len(loader.dataset)}"
            )
        generator = torch.Generator().manual_seed(derive_seed(module.seed, self.name, "prompts"))
        order = torch.randperm(len(loader.dataset), generator=generator)[: batches * size]
        chosen = order.view(batches, size).tolist()
        collated = [loader.collate_fn([loader.dataset[i] for i in part]) for part in chosen]
        return [{name: value.to(module.device) for name, value in batch.items()} for batch in collated]


def rounded(values: Tensor, digits: int) -> Any:
    """A tensor as nested lists of numbers of so many significant digits.

    Example:
        >>> rounded(torch.tensor([[1 / 3, 2.0]]), digits=4)
        [[0.3333, 2.0]]
    """
    if values.ndim:
        return [rounded(value, digits) for value in values]
    return float(f"{values.item():.{digits}g}")
