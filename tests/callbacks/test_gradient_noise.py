"""Noise and signal of the gradients against the gradients themselves, one prompt at a time."""

import csv

import pytest
import torch

from lit_klrb.callbacks import GradientNoiseMonitor, gradient_noise
from lit_klrb.errors import ConfigurationError

MONITOR = ["--trainer.callbacks+=GradientNoiseMonitor", "--trainer.callbacks.every_n_rollouts", "2"]


def logged(run, name):
    with next(run.glob("metrics/*/metrics.csv")).open(newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_it_looks_at_every_second_rollout_and_touches_nothing(chain, tmp_path):
    assert chain.run("fit", "rloo", *MONITOR, run=tmp_path) == 0
    first, other = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (chain.checkpoint("rloo"), tmp_path / "checkpoints" / "last.ckpt")
    )
    assert all(torch.equal(first[key], other[key]) for key in first)
    for name in ("noise_reward", "noise_kl", "noise_total", "snr_total", "kl_share"):
        assert set(logged(tmp_path, f"train/gradient_{name}")) == {0, 4}
    assert 0 < logged(tmp_path, "train/gradient_kl_share")[0] < 1


def test_moments_are_those_of_the_prompts_gradients(chain, tmp_path, monkeypatch):
    seen = []
    original = gradient_noise.prompt_gradients

    def looked(module, group_size):
        found = original(module, group_size)
        parameters = list(module.policy.parameters())
        gradients = []
        for start in range(0, len(module.experience.rewards), group_size):
            rows = module.experience.rows(slice(start, start + group_size))
            loss = module.loss_of(rows)
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        whole = torch.cat([p.grad.flatten() for p in parameters])
        seen.append((found, torch.stack(gradients), whole))
        return found

    monkeypatch.setattr(gradient_noise, "prompt_gradients", looked)
    off_clip = ["--trainer.gradient_clip_val", "0"]
    assert chain.run("fit", "rloo", *MONITOR, *off_clip, run=tmp_path) == 0
    for (sums, squares, count), gradients, whole in seen:
        assert count == len(gradients)
        assert torch.allclose(sums[2], gradients.sum(0), atol=1e-5)
        assert torch.allclose(sums[2] / count, whole, atol=1e-5)
        assert torch.allclose(sums[0] + sums[1], sums[2], atol=1e-5)
        assert squares[2].item() == pytest.approx(gradients.square().sum().item(), rel=1e-4)
        expected = gradients.T.double().cov().trace().item() / count
        assert gradient_noise.summary(sums, squares, count)["noise_total"] == pytest.approx(
            expected, rel=1e-3
        )


def test_without_a_leash_the_kl_has_no_gradient(chain, tmp_path):
    assert chain.run("fit", "rloo", *MONITOR, "--kl.beta", "0", run=tmp_path) == 0
    assert logged(tmp_path, "train/gradient_noise_kl")[0] == pytest.approx(0, abs=1e-12)


def test_a_module_without_rollouts_is_refused(chain, tmp_path, capsys):
    assert chain.run("fit", "sft", *MONITOR, run=tmp_path) == 2
    assert "GradientNoiseMonitor looks at rollouts, and SFTModule makes none" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="every_n_rollouts must be at least 1, got 0"):
        GradientNoiseMonitor(0)
