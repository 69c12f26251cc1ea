"""Token values in RLOO's training step: fitted strictly before the rollout they are applied to."""

import pytest
import torch
from single_steps import attached

from lit_klrb import estimators
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.estimators import EstimatorMemory
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.functional import TokenStats, token_stats
from lit_klrb.modules import RLOOModule
from lit_klrb.rollouts.scoring import completion_logits
from replication.to_come import RaoBlackwellTokenValues

STEPS = 3


def trained(chain, tmp_path, estimator, change=None):
    """The module after three rollouts without an optimizer; `change` alters the rewards of the last."""
    module, batch = attached(chain, tmp_path, estimator)
    plain, seen = module.pair.rewards, []

    def rewards(reward, rollout, batch):
        found = plain(reward, rollout, batch)
        return found if change is None or len(seen) < STEPS - 1 else change(found)

    module.pair.rewards = rewards
    for number in range(STEPS):
        module.zero_grad()
        module.training_step(batch, number).backward()
        seen.append((module.experience, module.experience.token_values))
    return module, seen


@pytest.mark.parametrize(
    ("kind", "off_policy"),
    [
        (estimators.TiltedRaoBlackwell, "none"),
        (estimators.TiltedRaoBlackwell, "clip"),
        (estimators.TiltedRaoBlackwell, "prefix"),
        (estimators.RaoBlackwellControlVariate, "none"),
        (RaoBlackwellTokenValues, "none"),
        (RaoBlackwellTokenValues, "prefix"),
    ],
)
def test_a_step_has_the_gradient_of_the_objective_on_whole_logits(chain, tmp_path, kind, off_policy):
    estimator = kind(off_policy=off_policy)
    module, seen = trained(chain, tmp_path, estimator)
    (_, nothing), *_, (experience, table) = seen
    assert nothing is None
    assert table.any()
    stepped = [p.grad.clone() for p in module.policy.parameters()]
    module.zero_grad()

    rollout = experience.rollout
    with torch.no_grad():
        ref_logits = completion_logits(module.reference, rollout)
    logits = completion_logits(module.policy, rollout)
    stats = token_stats(logits, ref_logits, rollout.completions, token_values=table)
    estimator.loss(
        stats, rollout.mask, experience.weights, beta=0.3, behaviour_logprobs=stats.logprobs.detach()
    ).backward()
    for gradient, parameter in zip(stepped, module.policy.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() <= 1e-3 * parameter.grad.norm() + 1e-5
    plain = stats._replace(value=None, expected_value=None).detach()
    without = estimator.weights(plain, rollout.mask, experience.rewards, beta=0.3, group_size=3)
    assert not torch.allclose(without.score, experience.weights.score, rtol=1e-3)


def test_the_table_of_a_rollout_is_fitted_to_those_before_it(chain, tmp_path):
    module, seen = trained(chain, tmp_path, estimators.TiltedRaoBlackwell())
    again = TokenValues()
    for experience, table in seen:
        again.fit(len(module.tokenizer))
        assert table is again.table is None or torch.equal(table, again.table)
        again.observe(experience.rollout.completions, experience.rollout.mask, experience.rewards, 3)
    _, other = trained(
        chain, tmp_path, estimators.TiltedRaoBlackwell(), change=lambda rewards: rewards.flip(0)
    )
    assert torch.equal(other[-1][1], seen[-1][1])
    assert not torch.equal(other[-1][0].rewards, seen[-1][0].rewards)
    assert module.experience.metrics["reward_explained"] == again.explained


@pytest.mark.parametrize("name", ["MonteCarlo", "TiltedRaoBlackwell", "RaoBlackwellControlVariate"])
def test_the_callback_keeps_what_its_estimator_remembers(name):
    first, second = (KLEstimatorCallback(getattr(estimators, name)()) for _ in range(2))
    module = RLOOModule(policy_path="policy", reference_path="reference")
    first.setup(None, module, "fit")
    assert module.memory is first.memory
    stats, mask = random_rollout()
    tokens, rewards = torch.arange(12).view(4, 3), torch.tensor([1.0, 3.0, 0.0, 2.0])
    module.memory.weights(stats, mask, rewards, beta=0.3, group_size=2, tokens=tokens)
    module.memory.observe(tokens, mask, rewards, stats, group_size=2)
    second.load_state_dict(first.state_dict())
    assert same_state(second.memory.state_dict(), first.memory.state_dict())
    assert same_state(second.memory.state_dict(), EstimatorMemory(first.memory.estimator).state_dict()) == (
        name == "MonteCarlo"
    )


def random_rollout():
    generator = torch.Generator().manual_seed(0)
    logprobs, reference, kl = torch.randn(3, 4, 3, generator=generator)
    return TokenStats(logprobs, reference, kl.abs()), torch.ones(4, 3, dtype=torch.bool)


def same_state(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[name], other[name]) for name in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
