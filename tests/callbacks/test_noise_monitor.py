"""Noise and signal of the gradients, compared with gradients computed prompt by prompt."""

import csv
from inspect import isabstract

import pytest
import torch
from single_steps import attached

from lit_klrb import estimators
from lit_klrb.callbacks import GradientNoiseMonitor, noise_monitor
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.scoring import completion_logprobs
from lit_klrb.studies.gradients import noise_and_signal

# All estimators, including those refused for training, have the same gradient of the reward.
ESTIMATORS = sorted(
    name
    for name, kind in vars(estimators).items()
    if isinstance(kind, type) and issubclass(kind, estimators.KLEstimator) and not isabstract(kind)
)
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
    original = noise_monitor.prompt_gradients

    def looked(module):
        found = original(module)
        parameters = list(module.policy.parameters())
        gradients = []
        for start in range(0, len(module.experience.rewards), module.group_size):
            rows = module.experience.rows(slice(start, start + module.group_size))
            loss = module.policy_loss(rows)
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        whole = torch.cat([p.grad.flatten() for p in parameters])
        seen.append((found, torch.stack(gradients), whole))
        return found

    monkeypatch.setattr(noise_monitor, "prompt_gradients", looked)
    off_clip = ["--trainer.gradient_clip_val", "0"]
    assert chain.run("fit", "rloo", *MONITOR, *off_clip, run=tmp_path) == 0
    for (sums, squares, count), gradients, whole in seen:
        assert count == len(gradients)
        assert torch.allclose(sums[2], gradients.sum(0), atol=1e-5)
        assert torch.allclose(sums[2] / count, whole, atol=1e-5)
        assert torch.allclose(sums[0] + sums[1], sums[2], atol=1e-5)
        assert squares[2].item() == pytest.approx(gradients.square().sum().item(), rel=1e-4)
        expected = gradients.T.double().cov().trace().item() / count
        assert noise_and_signal(sums, squares, count)["noise_total"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_rewards_noise_is_the_same_whichever_estimator_is_plugged_in(chain, tmp_path, name):
    module, batch = attached(chain, tmp_path, getattr(estimators, name)(), missing_eos_penalty=0.5)
    module.training_step(batch, 0)
    sums, squares, count = noise_monitor.prompt_gradients(module)
    expected = plain_reward_gradients(module)
    assert torch.allclose(sums[0], expected.sum(0), atol=1e-4 * expected.abs().max())
    assert squares[0].item() == pytest.approx(expected.square().sum().item(), rel=1e-4)
    noise = noise_and_signal(sums, squares, count)["noise_reward"]
    assert noise == pytest.approx(expected.double().T.cov().trace().item() / count, rel=1e-3)


def plain_reward_gradients(module):
    """REINFORCE with the mean reward of the other completions as baseline, prompt by prompt."""
    rollout, rewards = module.experience.rollout, module.experience.rewards
    logprobs = completion_logprobs(module.policy, rollout, module.sampling.temperature)
    total = torch.where(rollout.mask, logprobs, 0).sum(1)
    gradients = []
    for rows in torch.arange(len(rewards)).view(-1, module.group_size):
        loss = 0
        for row in rows:
            others = rows[rows != row]
            loss = loss - (rewards[row] - rewards[others].mean()) * total[row] / len(rows)
        gradient = torch.autograd.grad(loss, list(module.policy.parameters()), retain_graph=True)
        gradients.append(torch.cat([part.flatten() for part in gradient]))
    return torch.stack(gradients)


def test_at_beta_0_the_kl_has_no_gradient(chain, tmp_path):
    options = ["--kl.beta", "0", "--kl.estimator", "RaoBlackwell"]
    assert chain.run("fit", "rloo", *MONITOR, *options, run=tmp_path) == 0
    assert logged(tmp_path, "train/gradient_noise_kl")[0] == pytest.approx(0, abs=1e-12)


def test_a_module_without_rollouts_is_refused(chain, tmp_path, capsys):
    assert chain.run("fit", "sft", *MONITOR, run=tmp_path) == 2
    assert "GradientNoiseMonitor measures rollouts, but SFTModule has none" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="every_n_rollouts must be at least 1, got 0"):
        GradientNoiseMonitor(0)
