"""Comparison of run directories."""

import re
import shlex
import signal

import pytest
import torch

from analysis.results.curves import curves as read_curves
from benchmarks.kills.compare import differences as differences, different, trained as trained


def weights_of(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def curves(run):
    """Metric -> {"step": ..., "value": ...}, later attempts on top of earlier ones."""
    return read_curves(run / "metrics")


def assert_same_run(first, other):
    """Check that weights, optimizer, schedule, rollout, metrics and summary are bit-identical."""
    found = different(first, other)
    assert not found, found


def resume_command(printed):
    """The arguments of the command that a stopped run printed."""
    (command,) = re.findall(r"to resume: python -m lit_klrb (.*)", printed)
    return shlex.split(command)


@pytest.fixture
def signals_heard():
    """Enable Ctrl-C, which children of a shell in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
