"""Runs in processes of a group, and comparison of run directories."""

import csv
import re
import shlex
import signal
import socket
from contextlib import ExitStack

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from analysis.results.curves import curves as read_curves
from benchmarks.kills.children import Child
from benchmarks.kills.compare import differences as differences, different, trained as trained
from lit_klrb.cli import lightning as cli


def in_processes(number, command, argv, log):
    """Run a command in processes forked from this one, which has the libraries loaded."""
    assert exit_codes(number, command, argv, log) == [0] * number, log.read_text()


def exit_codes(number, command, argv, log):
    """The same, for any exit codes."""

    def with_one_thread(argv):
        torch.set_num_threads(1)  # a forked process has no others
        return command(argv)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NODE_RANK": "0"}
    ranks = [group | {"LOCAL_RANK": str(rank)} for rank in range(number)] if number > 1 else [{}]
    with ExitStack() as running:
        children = [running.enter_context(Child(with_one_thread, argv, log, rank)) for rank in ranks]
        return [child.wait() for child in children]


def one_line_of(capsys):
    """The only line of the standard error."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def contents(folder):
    """Place in the folder -> bytes of each of its files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights_of(run):
    return torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"]


def equal(first, other):
    """Whether two dictionaries of weights are equal, bit for bit."""
    return first.keys() == other.keys() and all(torch.equal(first[key], other[key]) for key in first)


def rows_of(run):
    """The rows of a run's metrics, as text."""
    with next(run.glob("metrics/*/metrics.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def logged(run, name):
    """Step -> value of a metric."""
    return {int(row["step"]): float(row[name]) for row in rows_of(run) if row.get(name)}


def with_callback(patch, callback, *, last=False):
    """Give each trainer of the command line a callback, the first or the last of them."""
    original = cli.LitCLI.instantiate_trainer

    def instantiate(self, **kwargs):
        trainer = original(self, **kwargs)
        trainer.callbacks.insert(len(trainer.callbacks) if last else 0, callback)
        return trainer

    patch.setattr(cli.LitCLI, "instantiate_trainer", instantiate)


class Stopped(Exception):
    """Stands for a kill."""


class StopAt(Callback):
    """Ends the run after a number of batches."""

    def __init__(self, batches):
        self.left = batches

    def on_train_batch_end(self, *_):
        self.left -= 1
        if self.left == 0:
            raise Stopped


def curves(run):
    """Metric -> {"step": ..., "value": ...}, later attempts on top of earlier ones."""
    return read_curves(run / "metrics")


def assert_same_run(first, other):
    """Check that weights, optimizer, schedule, rollout, metrics and summary are bit-identical."""
    found = different(first, other)
    assert not found, found


def resume_command(printed):
    """The arguments of the command that a stopped run printed."""
    (command,) = re.findall(r"to resume: lit-klrb (.*)", printed)
    return shlex.split(command)


@pytest.fixture
def signals_heard():
    """Enable Ctrl-C, which children of a shell in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
