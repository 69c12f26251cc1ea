"""What the common evaluation shows beyond its means: every KL value side by side, KL by position, texts."""

import io
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lit_klrb.distributed import stacked
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TokenStats, clustered_mean, kl_values
from lit_klrb.modules.regularised import Evaluation, RegularisedModule
from lit_klrb.run.files import csv_text, write_atomically


class EvaluationMonitor(L.Callback):
    """Looks at the completions of every evaluation, and writes what it finds into the run directory.

    A file belongs to one evaluation and is replaced when a resumed run repeats it.
    """

    def __init__(self) -> None:
        self._evaluations: list[Evaluation] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module whose evaluation has no completions.

        Raises:
            ConfigurationError: Naming both.
        """
        if not isinstance(pl_module, RegularisedModule):
            raise ConfigurationError(
                f"trainer.callbacks: {type(self).__name__} looks at completions, and the evaluation of "
                f"{type(pl_module).__name__} has none"
            )

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the batch."""
        self._evaluations.append(outputs["evaluation"])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Look at all of them."""
        evaluations, self._evaluations = self._evaluations, []
        if evaluations:
            self.look(trainer, pl_module, evaluations)

    def look(self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation]) -> None:
        """What the monitor does with the batches of one evaluation."""
        raise NotImplementedError

    def write(self, trainer: L.Trainer, folder: str, suffix: str, text: str) -> None:
        """Write the file of this evaluation, in a folder of the run directory; one process does."""
        if trainer.is_global_zero:
            name = f"step_{trainer.global_step:06d}.{suffix}"
            write_atomically(Path(trainer.default_root_dir) / folder / name, text)


class KLMonitor(EvaluationMonitor):
    """Logs every value of KL(policy‖reference) side by side, each with its standard error, in nats.

    In expectation all but k2 are the same number, per sequence: how far they lie apart shows their noise.
    `kl_rb_per_token` divides by the tokens. kl_by_position/step_N.csv has the KL at each position.

    Args:
        alpha: Of the control variate `kl_cv`; 1 is Schulman's.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def look(self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation]) -> None:
        """Log the values, write the positions."""
        stats, mask, completions = together(evaluations)
        group_size = evaluations[0].completions_per_prompt
        values = kl_values(stats, mask, completions, group_size=group_size, alpha=self.alpha)
        metrics: dict[str, float] = {}
        for name, value in values.items():
            mean, error = clustered_mean(value)
            metrics |= {f"kl_{name}": mean.item(), f"kl_{name}_se": error.item()}
        metrics["kl_rb_per_token"] = metrics["kl_rb"] / mask.sum(1).float().mean().item()
        pl_module.log_evaluation("val", metrics)
        assert stats.kl is not None
        means, errors, counts = by_position(stats.kl, mask, group_size)
        rows = zip(range(len(means)), means.tolist(), errors.tolist(), counts.tolist(), strict=True)
        text = csv_text(["position", "kl", "kl_se", "completions"], rows)
        self.write(trainer, "kl_by_position", "csv", text)


class CompletionTable(EvaluationMonitor):
    """Shows the first completions of each evaluation beside those of the first, with their rewards.

    They are printed, and written to completions/step_N.csv and, as a page, step_N.html.

    Args:
        rows: How many.
    """

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        if rows < 1:
            raise ConfigurationError(f"CompletionTable: rows must be at least 1, got {rows}")
        self.rows = rows
        self._first: list[tuple[str, float]] = []

    def look(self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation]) -> None:
        """Print and write the table."""
        evaluation = evaluations[0]
        every = evaluation.completions_per_prompt  # one completion a prompt
        texts = pl_module.texts(evaluation.rollout)[::every][: self.rows]
        now = list(zip(texts, evaluation.rewards[::every].tolist(), strict=False))
        self._first = self._first or now
        step = trainer.global_step
        table = Table("at the start", "reward", f"at step {step}", "reward", show_lines=True)
        for before, after in zip(self._first, now, strict=True):
            table.add_row(before[0], f"{before[1]:.2f}", after[0], f"{after[1]:.2f}")
        page = Console(record=True, width=160, file=io.StringIO())
        page.print(table)
        self.write(trainer, "completions", "html", page.export_html())
        rows = [[*before, *after] for before, after in zip(self._first, now, strict=True)]
        text = csv_text(["text_at_start", "reward_at_start", "text", "reward"], rows)
        self.write(trainer, "completions", "csv", text)
        if trainer.is_global_zero:
            Console().print(table)

    def state_dict(self) -> dict[str, Any]:
        """The first evaluation's completions."""
        return {"first": [list(row) for row in self._first]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them from a checkpoint."""
        self._first = [(text, reward) for text, reward in state_dict["first"]]


def together(evaluations: list[Evaluation]) -> tuple[TokenStats, Tensor, Tensor]:
    """Statistics, mask and completions of all batches as one, [B, longest completion]."""
    stats = TokenStats(*(stacked(parts) for parts in zip(*(e.stats for e in evaluations), strict=True)))
    mask = stacked([evaluation.rollout.mask for evaluation in evaluations])
    return stats, mask, stacked([evaluation.rollout.completions for evaluation in evaluations])


def by_position(values: Tensor, mask: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means at each position over the completions that reach it.

    Args:
        values: One number a token, [B, T]; completions of a prompt are adjacent.
        mask: Completion tokens, [B, T].
        group_size: Completions of each prompt.

    Returns:
        Means, their standard errors clustered by prompt (of a ratio, both sums being random), and how many
        completions reach the position, each [T].

    Example:
        >>> values, mask = torch.tensor([[1.0, 5.0], [3.0, 0.0]]), torch.tensor([[True, True], [True, False]])
        >>> [column.tolist() for column in by_position(values, mask, group_size=1)]
        [[2.0, 5.0], [1.0, 0.0], [2, 1]]
    """
    sums, counts = (
        part.unflatten(0, (-1, group_size)).sum(1) for part in (torch.where(mask, values, 0), mask)
    )
    means = sums.sum(0) / counts.sum(0)
    prompts = len(sums)
    scatter = (sums - means * counts).square().sum(0)
    errors = (scatter * prompts / (prompts - 1)).sqrt() / counts.sum(0)
    return means, errors, counts.sum(0)
