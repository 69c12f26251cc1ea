"""Training on a GPU beside a CPU; `make gpu` runs this and the tests of training there."""

import os
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from runs import logged
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb import terminal
from lit_klrb.cli import trainer
from lit_klrb.engine import decoding
from lit_klrb.engine.decoding import captures_graphs
from lit_klrb.engine.generation import Sampling, generate_completions
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


@pytest.fixture
def policy():
    """A model whose CUDA graphs can be captured, and how often Python has called it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=50, max_position_embeddings=64, **sizes)
    policy, calls = AutoModelForCausalLM.from_config(config).cuda().eval(), []
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)
    policy.register_forward_pre_hook(lambda *_: calls.append(1))
    return policy, calls


def sampled(policy, ends=()):
    prompts = torch.tensor([[1, 2, 3], [0, 4, 5]], device="cuda")
    options = {"seed": 0, "ends": ends, "pad_token_id": 0}
    return generate_completions(policy, prompts, prompts > 0, Sampling(8, 24), **options).completions


@on_a_gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("ends", [(), (7, 8, 9)])
def test_cuda_graphs_draw_the_same_tokens(policy, monkeypatch, ends, deterministic):
    model, calls = policy
    captures_graphs(model)
    calls.clear()
    torch.use_deterministic_algorithms(deterministic)
    try:
        twice = [sampled(model, ends), sampled(model, ends)]
    finally:
        torch.use_deterministic_algorithms(False)
    # The prompts, then two passes for each capture, which a batch of half the size needs again
    assert len(calls) == 2 * 3 if not ends else len(calls) < 2 * 12
    monkeypatch.setattr(decoding, "LEAST_CAPTURED", 1000)
    assert all(torch.equal(tokens, sampled(model, ends)) for tokens in twice)
    assert len(calls) > 2 * 12


@on_a_gpu
def test_a_failed_capture_leaves_decoding_without_graphs(policy, monkeypatch, capsys):
    model, _ = policy
    monkeypatch.setattr(terminal, "_SAID", set())
    with monkeypatch.context() as context:
        context.setattr(decoding, "LEAST_CAPTURED", 1000)
        expected = sampled(model)

    def wait(module, inputs, output):
        output.last_hidden_state.sum().item()

    model.model.register_forward_hook(wait)
    assert torch.equal(sampled(model), expected)
    assert torch.rand(1, device="cuda") < 1
    assert "without CUDA graphs" in capsys.readouterr().err


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
    monkeypatch.setattr(
        trainer, "prefer_determinism", lambda options: setattr(options, "deterministic", True)
    )
    try:
        assert chain.run("fit", "sft", "--trainer.max_steps", "1", run=tmp_path) == 0
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
