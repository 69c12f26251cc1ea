"""What the tests compare of run directories."""

import re
import shlex
import signal

import pytest
import torch

from analysis.sweep.harvest import curves as read_curves


def weights_of(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def curves(run):
    """Metric -> {"step": ..., "value": ...}, later attempts on top of earlier ones."""
    return read_curves(run / "metrics")


def differences(first, other, place=""):
    """Places where two checkpoints' contents are not the same, bit for bit."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in {**first, **other}:
            if key in first and key in other:
                yield from differences(first[key], other[key], f"{place}/{key}")
            else:
                yield f"{place}/{key}"
    elif isinstance(first, list | tuple) and isinstance(other, list | tuple):
        yield from differences(dict(enumerate(first)), dict(enumerate(other)), place)
    elif isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        if first.dtype != other.dtype or not torch.equal(first, other):
            yield place
    elif first != other:
        yield place


def trained(run):
    """What a run's last checkpoint holds, but the run's name, its place and the loops' counts."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    kept = {k: v for k, v in checkpoint.items() if k not in ("run", "loops", "epoch")}
    callbacks = {k: v for k, v in kept["callbacks"].items() if not k.startswith("RunCheckpoint")}
    return kept | {"callbacks": callbacks}


def assert_same_run(first, other):
    """Weights, optimizer, schedule, rollout, metrics and summary agree to the last bit."""
    found = list(differences(trained(first), trained(other)))
    assert not found, found
    assert curves(first) == curves(other)
    assert (first / "summary.json").read_text() == (other / "summary.json").read_text()


def resume_command(printed):
    """The arguments of the command that a stopped run printed."""
    (command,) = re.findall(r"to go on: python -m lit_klrb (.*)", printed)
    return shlex.split(command)


@pytest.fixture
def signals_heard():
    """The tests may run in the background of a shell, which makes its children ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
