"""Token values in RLOO's training step: fitted strictly before the rollout they are applied to."""

from types import SimpleNamespace

import pytest
import torch
from single_steps import attached

from lit_klrb import estimators
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.functional import token_stats
from lit_klrb.models.scoring import completion_logits

STEPS = 3


def trained(chain, tmp_path, estimator, change=None):
    """The module after three rollouts without an optimizer; `change` alters the rewards of the last."""
    module, batch = attached(chain, tmp_path, estimator)
    module.token_values = KLEstimatorCallback(estimator, 0.3).token_values
    plain, seen = module.rewards, []

    def rewards(rollout, batch):
        found = plain(rollout, batch)
        return found if change is None or len(seen) < STEPS - 1 else change(found)

    module.rewards = rewards
    for number in range(STEPS):
        module.zero_grad()
        module.training_step(batch, number).backward()
        seen.append((module.experience, module.token_value_table))
    return module, seen


@pytest.mark.parametrize(
    ("name", "off_policy"),
    [
        ("TiltedRaoBlackwell", "none"),
        ("TiltedRaoBlackwell", "clip"),
        ("TiltedRaoBlackwell", "prefix"),
        ("RaoBlackwellControlVariate", "none"),
        ("RaoBlackwellTokenValues", "none"),
        ("RaoBlackwellTokenValues", "prefix"),
    ],
)
def test_a_step_has_the_gradient_of_the_objective_on_whole_logits(chain, tmp_path, name, off_policy):
    estimator = getattr(estimators, name)(off_policy=off_policy)
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
    behaviour = stats.logprobs.detach()
    estimator.objective(
        stats, rollout.mask, experience.rewards, beta=0.3, group_size=3, behaviour_logprobs=behaviour
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
    assert module.experience.metrics["reward_explained"] == module.token_values.explained


def test_a_table_of_the_kl_to_come_is_fitted_to_the_rollouts_before_it(chain, tmp_path):
    estimator = estimators.RaoBlackwellTokenValues(discount=0.9, allow_biased=True)
    module, batch = attached(chain, tmp_path, estimator)
    callback = KLEstimatorCallback(estimator, 0.3)
    module.token_values, module.earlier_rollouts = callback.token_values, callback.earlier_rollouts
    observe, again, sums = module.observe, TokenValues(predicted="kl_to_come"), []

    def observed(rollout, stats, rewards):
        again.fit(len(module.tokenizer))
        table = module.token_value_table
        assert table is again.table is None or torch.equal(table, again.table)
        again.observe_to_come(rollout.completions, rollout.mask, stats.kl, 3, discount=0.9)
        observe(rollout, stats, rewards)
        sums.append(module.earlier_rollouts.sums)

    module.observe = observed
    for number in range(STEPS):
        module.training_step(batch, number)
    assert again.table.any()
    assert torch.equal(module.token_values.state_dict()["tokens"], again.state_dict()["tokens"])
    assert module.experience.metrics["kl_explained"] == again.explained
    assert "reward_explained" not in module.experience.metrics
    assert not sums[0].products.any()  # the first rollout has no table
    assert sums[1].products.any()


def test_the_callback_keeps_token_values_for_estimators_that_read_them():
    module = SimpleNamespace(uses_kl_estimator=True)
    callback = KLEstimatorCallback(estimators.MonteCarlo())
    callback.setup(None, module, "fit")
    assert module.token_values is None
    assert callback.state_dict() == {"current": 0.07}
    first, second = (KLEstimatorCallback(estimators.TiltedRaoBlackwell()) for _ in range(2))
    tokens, rewards = torch.tensor([[0, 1], [0, 2]]), torch.tensor([1.0, 3.0])
    first.token_values.observe(tokens, torch.ones(2, 2) > 0, rewards, 2)
    first.token_values.fit(4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.token_values.table, first.token_values.table)
    second.load_state_dict({"current": 0.1})  # saved by a version without token values
    assert second.current == 0.1
