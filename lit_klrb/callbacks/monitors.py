"""Monitors of the common evaluation: all KL estimates, the KL by position, and sample completions."""

import csv
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from torch import Tensor

from lit_klrb import schema
from lit_klrb.distributed import stacked, stacked_stats
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import csv_text, write_atomically
from lit_klrb.functional import TokenStats, clustered_mean, kl_values
from lit_klrb.functional.statistics import influence_error, ratio_of_means
from lit_klrb.modules.regularised import RegularisedModule
from lit_klrb.rollouts.evaluation import Evaluation
from lit_klrb.terminal import text_table


class EvaluationMonitor(L.Callback, ABC):
    """Processes the completions of every evaluation, in `fit`, `validate` and `test`.

    Files are written to the run directory and named after the step, or `validate` and `test` if those
    commands evaluate a checkpoint. A resumed run overwrites the files of evaluations that it repeats.
    """

    def __init__(self) -> None:
        self._evaluations: list[Evaluation] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that module and command evaluate completions."""
        name = f"trainer.callbacks: {type(self).__name__}"
        if not isinstance(pl_module, RegularisedModule):
            module = type(pl_module).__name__
            raise ConfigurationError(f"{name} needs completions, but the evaluation of {module} has none")
        if stage == "predict":
            raise ConfigurationError(f"{name} needs an evaluation, but predict has none")

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keep the batch."""
        self._evaluations.append(outputs["evaluation"])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Report on all batches of the evaluation."""
        self._report(trainer, pl_module, "val")

    def on_test_batch_end(self, *arguments: Any) -> None:
        """As in validation."""
        self.on_validation_batch_end(*arguments)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """As in validation."""
        self._report(trainer, pl_module, "test")

    def _report(self, trainer: L.Trainer, pl_module: RegularisedModule, stage: str) -> None:
        evaluations, self._evaluations = self._evaluations, []
        if evaluations:
            self.report(trainer, pl_module, evaluations, stage)

    @abstractmethod
    def report(
        self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation], stage: str
    ) -> None:
        """Process the batches of an evaluation."""

    def write(self, trainer: L.Trainer, folder: str, suffix: str, text: str) -> None:
        """Write a file of this evaluation to a folder of the run directory, in one process only."""
        if trainer.is_global_zero:
            name = f"{step_label(trainer)}.{suffix}"
            write_atomically(Path(trainer.default_root_dir) / folder / name, text)


def step_label(trainer: L.Trainer) -> str:
    """The step of an evaluation during a run, or the name of the command that evaluates a checkpoint."""
    fn = trainer.state.fn
    if fn is None or fn == TrainerFn.FITTING or trainer.global_step:
        return f"step_{trainer.global_step:06d}"
    return fn.value


@final
class KLMonitor(EvaluationMonitor):
    """Logs all estimates of KL(policy‖reference) with standard errors, in nats per sequence.

    All but k2 have the same expectation, so their differences show their noise. `kl_rb_per_token` is in nats
    per token. kl_by_position/step_N.csv has the KL at each position.
    """

    needs_reference = True

    def report(
        self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation], stage: str
    ) -> None:
        """Log the estimates and write the KL by position."""
        stats, mask, completions = together(evaluations)
        group_size = evaluations[0].completions_per_prompt
        values = kl_values(stats, mask, completions, group_size=group_size)
        metrics: dict[str, float] = {}
        for name, value in values.items():
            mean, error = clustered_mean(value)
            metrics |= {f"kl_{name}": mean.item(), f"kl_{name}_se": error.item()}
        metrics["kl_rb_per_token"] = metrics["kl_rb"] / mask.sum(1).float().mean().item()
        pl_module.log_evaluation(stage, metrics)
        assert stats.kl is not None
        means, errors, counts = by_position(stats.kl, mask, group_size)
        rows = zip(range(len(means)), means.tolist(), errors.tolist(), counts.tolist(), strict=True)
        text = csv_text(["position", "kl", "kl_se", "completions"], rows)
        self.write(trainer, schema.KL_BY_POSITION, "csv", text)


@final
class CompletionTable(EvaluationMonitor):
    """Shows completions of each evaluation, beside those of the first, with rewards.

    The table is printed and written to completions/step_N.csv.

    Args:
        rows: Number of prompts to show, with one completion each.
    """

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        if rows < 1:
            raise ConfigurationError(f"CompletionTable: rows must be at least 1, got {rows}")
        self.rows = rows
        self._first: dict[str, list[list[Any]]] = {}

    def report(
        self, trainer: L.Trainer, pl_module: RegularisedModule, evaluations: list[Evaluation], stage: str
    ) -> None:
        """Print and write the table."""
        evaluation = evaluations[0]
        every = evaluation.completions_per_prompt  # one completion per prompt
        shown = slice(0, every * self.rows, every)
        texts = pl_module.pair.texts(evaluation.rollout.rows(shown))
        current = [list(row) for row in zip(texts, evaluation.rewards[shown].tolist(), strict=True)]
        first = self._first.setdefault(stage, current)
        rows = [[*before, *after] for before, after in zip(first, current, strict=False)]
        header = ["first evaluation", "reward", step_label(trainer), "reward"]
        alone = first is current  # the first evaluation has nothing to be compared with
        table = (header[2:], current) if alone else (header, rows)
        columns = ["text_at_start", "reward_at_start", "text", "reward"]
        self.write(trainer, schema.COMPLETIONS, "csv", csv_text(columns, rows, csv.QUOTE_NONNUMERIC))
        if trainer.is_global_zero:
            Console().print(text_table(*table))

    def state_dict(self) -> dict[str, Any]:
        """The completions of the first evaluation, by stage."""
        return {"first": self._first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the completions of the first evaluation."""
        self._first = state_dict["first"]


def together(evaluations: list[Evaluation]) -> tuple[TokenStats, Tensor, Tensor]:
    """Concatenate statistics, masks and completions of all batches, shape [B, longest completion]."""
    stats = stacked_stats([evaluation.stats for evaluation in evaluations])
    mask = stacked([evaluation.rollout.mask for evaluation in evaluations])
    return stats, mask, stacked([evaluation.rollout.completions for evaluation in evaluations])


def by_position(values: Tensor, mask: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means at each position over the completions that reach it.

    Args:
        values: One value per token, shape [B, T], prompt-major.
        mask: True on completion tokens, shape [B, T].
        group_size: Completions per prompt.

    Returns:
        Means, their standard errors clustered by prompt, and the number of completions that reach the
        position, shape [T] each. The mean is a ratio of two random sums, hence the delta method.

    Example:
        >>> values, mask = torch.tensor([[1.0, 5.0], [3.0, 0.0]]), torch.tensor([[True, True], [True, False]])
        >>> [column.tolist() for column in by_position(values, mask, group_size=1)]
        [[2.0, 5.0], [1.0, 0.0], [2, 1]]
    """
    sums, counts = (
        part.unflatten(0, (-1, group_size)).sum(1) for part in (torch.where(mask, values, 0), mask)
    )
    means, influences = ratio_of_means(sums.mT, counts.mT.to(sums))
    return means, influence_error(influences), counts.sum(0)
