"""Sums of earlier rollouts in RLOO's training step: a rollout is weighed with those before it."""

import torch
from single_steps import attached

from lit_klrb import estimators
from lit_klrb.estimators.cross_fit import EarlierRollouts

SETTINGS = {"beta": 0.3, "group_size": 3}


def test_the_coefficients_of_a_rollout_are_fitted_on_the_other_prompts_and_the_rollouts_before(
    chain, tmp_path
):
    estimator = estimators.RaoBlackwellControlVariate()
    module, batch = attached(chain, tmp_path, estimator)
    original, rollouts = module.memory.weights, []

    def weights(*rollout, **settings):
        found = original(*rollout, **settings)
        rollouts.append((rollout, found))
        return found

    module.memory.weights = weights
    for number in range(3):
        module.training_step(batch, number)
    again = EarlierRollouts()
    for number, (rollout, weights) in enumerate(rollouts):
        expected, sums = estimator.fitted_weights(again.sums, *rollout, **SETTINGS)
        assert torch.equal(weights.score, expected.score)
        assert torch.equal(weights.kl, expected.kl)
        alone = estimator.weights(*rollout, **SETTINGS)
        assert torch.equal(weights.score, alone.score) == (number == 0)
        again.observe(sums)
    state = module.memory.state_dict()["earlier_rollouts"]
    assert all(map(torch.equal, state.values(), again.sums))
