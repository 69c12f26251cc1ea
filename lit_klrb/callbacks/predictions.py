"""What a run shows: the progress bar, and predictions as a file and a printed table."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

from lit_klrb.errors import printable
from lit_klrb.files import check_own, write_atomically
from lit_klrb.run.directory import KEY as DIRECTORY
from lit_klrb.terminal import text_table

# Keys of the rows that this package's modules predict.
ROWS = (
    {"prompt", "completion", "kl"},
    {"text", "nats_per_token"},
    {"text", "label", "probability"},
    {"chosen", "rejected", "chosen_reward", "rejected_reward"},
)
PRINTED_ROWS, PRINTED_CHARACTERS = 10, 160


class PredictionWriter(L.Callback):
    """Writes what `predict` returns to predictions.jsonl, and prints the first rows.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "predictions.jsonl"
        self._rows: list[dict[str, Any]] = []

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Collect the batch's rows; after the first, refuse to replace a file with rows of another kind."""
        if not self._rows and outputs:
            kinds = (*ROWS, set(outputs[0]))
            check_own(self.path, lambda row: any(kind <= row.keys() for kind in kinds), DIRECTORY)
        self._rows += outputs

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write all rows and print the first, in one process only, as every process has all."""
        if not trainer.is_global_zero:
            return
        write_atomically(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows))
        if self._rows:
            shown = [list(map(_short, row.values())) for row in self._rows[:PRINTED_ROWS]]
            Console().print(text_table(list(self._rows[0]), shown))
        print(printable(f"{len(self._rows)} rows in {self.path}"))


def _short(value: Any) -> Any:
    """A number, or a text or messages in few characters."""
    if isinstance(value, (int, float)):
        return value
    text = "\n".join(f"{m['role']}: {m['content']}" for m in value) if isinstance(value, list) else str(value)
    return text if len(text) <= PRINTED_CHARACTERS else f"{text[:PRINTED_CHARACTERS]} ..."


class RunProgressBar(RichProgressBar):
    """A progress bar that counts steps instead of epochs, as training data are infinite."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The metrics that modules log with `prog_bar`, without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{'Training':{len(self.validation_description)}}"
