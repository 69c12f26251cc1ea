"""RLOO with a teacher as its reference: the gradient by enumeration, and in a run of the configuration."""

import pytest
import torch
from test_teacher_gradient import (
    COMPLETIONS,
    PROMPTS,
    completion_mask,
    exact_kl,
    expected_gradients,
    flat_gradient,
    pair_of,
    sequence_logprobs,
    tiny,
)

from lit_klrb.cli.main import main
from lit_klrb.estimators import MonteCarlo, RaoBlackwell
from lit_klrb.functional import token_stats
from lit_klrb.models import loading
from lit_klrb.modules import RLOOModule
from lit_klrb.rollouts.scoring import completion_logits

BETA = 0.7


def reward(tokens):
    """Of a completion; no sum over its tokens."""
    return 1.5 * tokens[0] - tokens[0] * tokens[1] + 0.5


def expected_reward(policy):
    """E[reward], mean over the prompts."""
    chosen = torch.tensor(COMPLETIONS)[..., None]
    mask = torch.tensor([completion_mask(completion) for completion in COMPLETIONS])
    rewards = torch.tensor([reward(completion) for completion in COMPLETIONS])
    rows = (sequence_logprobs(policy, prompt).gather(-1, chosen)[..., 0] * mask for prompt in PROMPTS)
    return sum((row.sum(1).exp() * rewards).sum() for row in rows) / len(PROMPTS)


@pytest.mark.parametrize("estimator", [RaoBlackwell(), MonteCarlo()])
def test_the_expected_gradient_is_that_of_the_reward_and_the_kl_to_the_teacher(estimator):
    policy, teacher = tiny("gpt2", seed=0), tiny("gpt2", seed=1)
    module = RLOOModule(policy_path="student", reference_path="teacher", reward_path="grammar")
    module.policy, module.pair = policy, pair_of(policy, teacher)
    parts = BETA * exact_kl(policy, teacher), -expected_reward(policy)
    parts = [flat_gradient(part, list(policy.parameters())) for part in parts]
    assert all(part.abs().max() > 1e-2 for part in parts)
    gradients, *_ = expected_gradients(estimator, module, True, reward, BETA)
    for gradient in gradients:
        assert (gradient - sum(parts)).abs().max().item() < 1e-10


def folder(path, seed):
    """A tiny model of the grammar's vocabulary."""
    tokenizer = loading.load_tokenizer("path", "grammar")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}
    model = loading.fresh_model(config, tokenizer, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_step_of_the_configuration_has_the_gradient_on_whole_logits(tmp_path, monkeypatch):
    student, teacher = folder(tmp_path / "student", 0), folder(tmp_path / "teacher", 1)
    compared = []

    def compare(module, optimizer):
        stepped = [parameter.grad.clone() for parameter in module.policy.parameters()]
        rollout, rewards = module.experience.rollout, module.experience.rewards
        models = module.policy, loading.load_model("path", teacher)
        with torch.enable_grad():
            stats = token_stats(*(completion_logits(m, rollout) for m in models), rollout.completions)
            stats = stats._replace(ref_logprobs=stats.ref_logprobs.detach())
            loss = RaoBlackwell().objective(stats, rollout.mask, rewards, beta=1.0, group_size=4)
            expected = torch.autograd.grad(loss, list(module.policy.parameters()))
        compared.extend(zip(stepped, expected, strict=True))
        assert module.kl_estimator == RaoBlackwell()
        assert rewards.std() > 0.1

    monkeypatch.setattr(RLOOModule, "on_before_optimizer_step", compare, raising=False)
    few = ["--data.train_size", "8", "--data.eval_size", "4", "--data.batch_size", "4"]
    few += ["--model.max_new_tokens", "8", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    few += ["--trainer.default_root_dir", str(tmp_path / "run")]
    paths = ["--model.policy_path", student, "--model.reference_path", teacher]
    assert main(["fit", "--config", "configs/demo/rloo_teacher.yaml", *few, *paths]) == 0
    assert len(compared) > 10
    for stepped, expected in compared:
        assert (stepped - expected).norm() <= 1e-3 * expected.norm() + 1e-5
    assert max(expected.abs().max() for _, expected in compared) > 1e-3
