"""Metrics are appended, row by row; new columns lose nothing, and a torn line is dropped by the reader."""

import csv
import os
from types import SimpleNamespace

import pytest

from analysis.results.curves import curves
from lit_klrb.callbacks import RunCheckpoint
from lit_klrb.run.loggers import MetricsLogger, run_loggers


@pytest.fixture
def logger(tmp_path):
    return MetricsLogger(tmp_path / "metrics" / "attempt_0")


def rows(logger):
    with logger.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_any_columns_are_kept(logger):
    logger.log_metrics({"val/kl": 0.1, "epoch": 0}, 0)
    logger.log_metrics({"train/loss": 2.5, "epoch": 0}, 0)
    logger.log_metrics({"train/loss": float("nan")}, 1)
    logger.log_metrics({"time/seconds": 3.0, "train/loss": 1e-5}, 2)
    assert rows(logger) == [
        {"epoch": "0", "step": "0", "time/seconds": "", "train/loss": "", "val/kl": "0.1"},
        {"epoch": "0", "step": "0", "time/seconds": "", "train/loss": "2.5", "val/kl": ""},
        {"epoch": "", "step": "1", "time/seconds": "", "train/loss": "nan", "val/kl": ""},
        {"epoch": "", "step": "2", "time/seconds": "3.0", "train/loss": "1e-05", "val/kl": ""},
    ]


def test_what_is_written_is_not_written_again(logger):
    """The file only grows, but where a column is new: 5,000 steps used to take 31 s."""
    written = []
    for step in range(200):
        before = logger.path.read_bytes() if logger.path.exists() else None
        logger.log_metrics({"train/loss": step / 7, **({"train/late": 1.0} if step >= 100 else {})}, step)
        after = logger.path.read_bytes()
        written.append(len(after) - len(before) if before and after.startswith(before) else len(after))
    assert sum(size > 100 for size in written) == 1
    assert len(rows(logger)) == 200
    assert not hasattr(logger, "_rows")


def test_names_are_written_as_printable_text(logger, tmp_path):
    """Of any name the file can be read again, by readers for whom any line separator ends a line."""
    odd = 'train/a,"b"\nc\u2028d\ud800\u202ee\x85'
    logger.log_metrics({odd: 1.0}, 0)
    logger.log_metrics({odd: 2.0, "train/f": 3.0}, 1)
    name = 'train/a,"b"\\nc\\u2028d\\ud800\\u202ee\\x85'
    assert [row[name] for row in rows(logger)] == ["1.0", "2.0"]
    assert len(logger.path.read_text("utf-8").splitlines()) == 3
    assert curves(tmp_path / "metrics")[name] == {"step": [0, 1], "value": [1.0, 2.0]}


def test_a_torn_last_line_is_dropped_by_the_reader(logger, tmp_path):
    for step in range(3):
        logger.log_metrics({"train/loss": 0.125 + step, "val/kl": 12.75}, step)
    whole = logger.path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in range(last, len(whole) + 1):
        logger.path.write_bytes(whole[:length])
        steps = 3 if length == len(whole) else 2
        assert curves(tmp_path / "metrics") == {
            "train/loss": {"step": [0, 1, 2][:steps], "value": [0.125, 1.125, 2.125][:steps]},
            "val/kl": {"step": [0, 1, 2][:steps], "value": [12.75] * steps},
        }, length


def test_a_file_torn_in_its_header_has_no_curves(logger, tmp_path):
    logger.log_metrics({"train/loss": 1.0}, 0)
    whole = logger.path.read_bytes()
    for length in range(whole.find(b"\n") + 1):
        logger.path.write_bytes(whole[:length])
        assert curves(tmp_path / "metrics") == {}


def test_every_run_has_its_record_and_each_attempt_files_of_its_own(tmp_path):
    for attempt in ("attempt_0", "attempt_1"):
        record, tensorboard = run_loggers(tmp_path)
        record.log_metrics({"train/loss": 1.0}, 0)
        assert record.path == tmp_path / "metrics" / attempt / "metrics.csv"
        assert tensorboard.log_dir == str(tmp_path / "tensorboard" / attempt)
        assert (record.name, record.version) == ("metrics", attempt)
    assert len(run_loggers(tmp_path, tensorboard=False)) == 1


def test_a_checkpoint_waits_until_all_that_is_logged_before_it_is_on_disk(logger, monkeypatch, tmp_path):
    """A resumed run does not log these steps again."""
    synced, saved, fsync = [], [], os.fsync
    other = SimpleNamespace(save=lambda: saved.append("other"))
    trainer = SimpleNamespace(loggers=[logger, other])
    progress = {"ready": 4, "completed": 3}
    checkpoint = {"loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": progress}}}}
    logger.log_metrics({"train/loss": 1.0}, 0)
    monkeypatch.setattr(
        "os.fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    RunCheckpoint(dirpath=tmp_path).on_save_checkpoint(trainer, None, checkpoint)
    assert synced == [str(logger.path)]
    assert saved == ["other"]
    assert progress == {"ready": 3, "completed": 3}
