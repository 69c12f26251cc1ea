"""The loggers of a run: CSV and TensorBoard, each attempt at it in files of its own."""

from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lit_klrb import schema
from lit_klrb.run.directory import next_attempt
from lit_klrb.run.files import csv_text, write_atomically


class MetricsWriter(ExperimentWriter):
    """Replaces the file at once. Lightning's own appends to it, and empties it where a new metric appears."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._rows: list[dict[str, Any]] = []

    def save(self) -> None:
        """Write every row there is."""
        if self.metrics:
            self._rows += self.metrics
            self.metrics = []
            keys = sorted(set().union(*self._rows))
            rows = ([row.get(key) for key in keys] for row in self._rows)
            write_atomically(Path(self.metrics_file_path), csv_text(keys, rows))


class MetricsLogger(CSVLogger):
    """Lightning's CSV logger, safe from kills."""

    @property
    @rank_zero_experiment
    def experiment(self) -> MetricsWriter:
        """The writer."""
        if not isinstance(self._experiment, MetricsWriter):
            self._experiment = MetricsWriter(self.log_dir)
        return self._experiment


def default_loggers(root: Path) -> list[Any]:
    """CSV and TensorBoard; each attempt at a run has files of its own, so that resuming loses none."""
    attempt = f"attempt_{next_attempt(root)}"
    return [
        MetricsLogger(root, name=schema.METRICS_DIR, version=attempt, flush_logs_every_n_steps=20),
        TensorBoardLogger(root, name="tensorboard", version=attempt),
    ]
