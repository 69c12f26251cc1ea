"""Loggers of a run: metrics as CSV and for TensorBoard, in separate files for each attempt."""

import csv
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_klrb import schema
from lit_klrb.errors import printable, refusing
from lit_klrb.files import csv_text, write_atomically
from lit_klrb.run.directory import RunDirectory, next_attempt
from lit_klrb.run.lightning_internals import name_run

# Where W&B finds the id of a run whose logger has none.
WANDB_ID = "WANDB_RUN_ID"


class MetricsLogger(Logger):
    """Appends each row to metrics.csv.

    After a power failure at most the last line is incomplete; readers drop a line without a newline. If a new
    metric appears, which happens only in the first few rows, the file is rewritten with another column.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self._columns: list[str] = []

    @property
    def name(self) -> str:
        """The folder of all attempts."""
        return self.path.parent.parent.name

    @property
    def version(self) -> str:
        """The attempt."""
        return self.path.parent.name

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the configuration is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row; names are written as printable text, of which every line is a row."""
        row = {printable(name): value for name, value in metrics.items()} | {schema.STEP: step}
        if not row.keys() <= set(self._columns):
            rows: list[dict[str, str]] = []
            if self._columns:
                with self.path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            columns = sorted({*row, *self._columns})
            cells = ([earlier.get(name) for name in columns] for earlier in rows)
            write_atomically(self.path, csv_text(columns, cells))
            self._columns = columns
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    @rank_zero_only
    def sync(self) -> None:
        """Wait until every row is on disk."""
        if self._columns:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


class BoardLogger(TensorBoardLogger):
    """Events for TensorBoard, and no copy of config.yaml, which fails for some texts with `${`."""

    @rank_zero_only
    def save(self) -> None:
        """Write the events."""
        super(TensorBoardLogger, self).save()


def run_loggers(root: Path, tensorboard: bool = True) -> list[Logger]:
    """The loggers of a run: CSV, and TensorBoard if requested."""
    attempt = f"attempt_{next_attempt(root)}"
    loggers: list[Logger] = [MetricsLogger(root / schema.METRICS_DIR / attempt)]
    if tensorboard:
        loggers.append(BoardLogger(root, name=schema.TENSORBOARD, version=attempt))
    return loggers


def tell_loggers(loggers: Iterable[Logger], settings: Mapping[str, Any], directory: RunDirectory) -> None:
    """Give every logger the settings of the run, its name and its folder; W&B also the run's id."""
    root = directory.path
    hyperparameters = {**settings, "run.name": root.name, "run.folder": str(root.absolute())}
    # With the same id, a resumed run continues W&B's run instead of starting another one
    named = os.environ.setdefault(WANDB_ID, directory.run_id) != directory.run_id
    try:
        for logger in loggers:
            name_run(logger, f"{root.name} {directory.run_id}", str(root))
            with refusing(f"{type(logger).__name__} cannot be used", key="trainer.logger"):
                logger.log_hyperparams(hyperparameters)
    finally:
        if not named:
            del os.environ[WANDB_ID]
