"""Options that change how a gradient is computed but not its value, separately and together."""

from collections import Counter

import pytest
import torch
from runs import weights_of
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from lit_klrb.modules import RLOOModule

OPTIONS = {
    "checkpointing": ["--model.gradient_checkpointing", "true"],
    "accumulation": ["--trainer.accumulate_grad_batches", "2"],
    "bf16": ["--trainer.precision", "bf16-mixed"],
}


@pytest.fixture
def gradients(monkeypatch):
    """The first gradient of each run, before clipping, and the sequences of all forward passes of a block."""
    found = {"calls": Counter()}

    def keep(self, optimizer):
        found.setdefault("gradient", torch.cat([p.grad.flatten() for p in self.policy.parameters()]).clone())

    original = GPT2MLP.forward

    def counted(self, *args):
        found["calls"][torch.is_grad_enabled()] += len(args[0])
        return original(self, *args)

    monkeypatch.setattr(RLOOModule, "on_before_optimizer_step", keep)
    monkeypatch.setattr(GPT2MLP, "forward", counted)
    return found


def first_gradient(chain, gradients, run, *options):
    gradients.pop("gradient", None)
    gradients["calls"].clear()
    argv = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", *options]
    assert chain.run("fit", "rloo", *argv, run=run) == 0
    return gradients["gradient"], dict(gradients["calls"])


def test_alone_and_together_they_give_the_gradient(chain, tmp_path, gradients, monkeypatch):
    plain, plain_calls = first_gradient(chain, gradients, tmp_path / "plain")
    for name, options in OPTIONS.items():
        gradient, calls = first_gradient(chain, gradients, tmp_path / name, *options)
        error = (gradient - plain).norm() / plain.norm()
        assert error < (0.1 if name == "bf16" else 1e-5), name
        assert (error > 1e-4) == (name == "bf16"), name
        if name == "checkpointing":
            sequences = plain_calls[True] - 4  # and the four prompts alone
            assert calls[True] == 2 * sequences > 0
    together = [word for options in OPTIONS.values() for word in options]
    gradient, _ = first_gradient(chain, gradients, tmp_path / "all", *together)
    assert (gradient - plain).norm() / plain.norm() < 0.1


def test_checkpointing_changes_no_draw_and_no_dropout(chain, tmp_path):
    drop = ["--model.policy_config.resid_pdrop", "0.2"]
    runs = {"without": drop, "with": [*drop, *OPTIONS["checkpointing"]]}
    for name, options in runs.items():
        assert chain.run("fit", "sft", *options, run=tmp_path / name) == 0
    first, second = (weights_of(tmp_path / name) for name in runs)
    assert all(torch.allclose(first[key], second[key], atol=1e-6) for key in first)
