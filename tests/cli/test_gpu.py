"""Training on a GPU beside a CPU; `make gpu` runs this and the tests of training there."""

import os
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from runs import logged

from lit_klrb.cli import lightning as cli
from lit_klrb.functional.credit import running_sum
from lit_klrb.run.options import prefer_determinism

on_a_gpu = pytest.mark.skipif("LIT_KLRB_TEST_ACCELERATOR" not in os.environ, reason="make gpu runs it")


@on_a_gpu
def test_the_steps_are_those_of_a_cpu(chain, tmp_path):
    assert chain.run("fit", "rloo", "--trainer.accelerator", "cpu", run=tmp_path) == 0
    for name in ("train/kl", "train/reward", "train/loss", "val/kl"):
        here, there = logged(chain.root / "rloo", name), logged(tmp_path, name)
        assert here == pytest.approx(there, rel=1e-3, abs=1e-5)


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_running_sums_repeat_bit_for_bit(rows):
    values = torch.randn(rows, 1000, dtype=torch.float64)
    first, *others = (running_sum(values.cuda()) for _ in range(20))
    assert torch.allclose(first.cpu(), values.cumsum(-1), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("accelerator", "has_gpu", "given", "expected"),
    [
        ("auto", True, None, True),
        ("gpu", True, None, True),
        ("gpu", True, False, False),
        ("cpu", True, None, None),
        ("auto", False, None, None),
    ],
)
def test_only_a_gpu_gets_deterministic_algorithms(monkeypatch, accelerator, has_gpu, given, expected):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: has_gpu)
    options = SimpleNamespace(accelerator=accelerator, deterministic=given)
    prefer_determinism(options)
    assert options.deterministic is expected
    assert torch.utils.deterministic.fill_uninitialized_memory is (expected is not True)


def test_fit_prefers_it(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "prefer_determinism", lambda options: setattr(options, "deterministic", True))
    try:
        assert chain.run("fit", "sft", "--trainer.max_steps", "1", run=tmp_path) == 0
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
