"""Sums of earlier rollouts in RLOO's training step: a rollout is weighed with those before it."""

from types import SimpleNamespace

import torch
from single_steps import attached

from lit_klrb import estimators
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.estimators.cross_fit import EarlierRollouts, FitSums

SETTINGS = {"beta": 0.3, "group_size": 3}


def test_the_coefficients_of_a_rollout_are_fitted_on_the_other_prompts_and_the_rollouts_before(
    chain, tmp_path
):
    estimator = estimators.RaoBlackwellControlVariate()
    module, batch = attached(chain, tmp_path, estimator)
    module.earlier_rollouts = EarlierRollouts()
    original, rollouts = module.weigh, []

    def weigh(*rollout):
        weights = original(*rollout)
        rollouts.append((rollout, weights))
        return weights

    module.weigh = weigh
    for number in range(3):
        module.training_step(batch, number)
    again = EarlierRollouts()
    for number, (rollout, weights) in enumerate(rollouts):
        expected = estimator.weights_after(again.sums, *rollout, **SETTINGS)
        assert torch.equal(weights.score, expected.score)
        assert torch.equal(weights.kl, expected.kl)
        alone = estimator.weights(*rollout, **SETTINGS)
        assert torch.equal(weights.score, alone.score) == (number == 0)
        again.observe(estimator.fit_sums(*rollout, **SETTINGS))
    assert all(map(torch.equal, module.earlier_rollouts.sums, again.sums))


def test_the_callback_keeps_the_sums_for_the_estimator_that_fits_on_them():
    module = SimpleNamespace(uses_kl_estimator=True)
    KLEstimatorCallback(estimators.TiltedRaoBlackwell()).setup(None, module, "fit")
    assert module.earlier_rollouts is None
    module = SimpleNamespace(uses_kl_estimator=True)
    first, second = (KLEstimatorCallback(estimators.RaoBlackwellControlVariate()) for _ in range(2))
    first.setup(None, module, "fit")
    assert module.earlier_rollouts is first.earlier_rollouts
    generator = torch.Generator().manual_seed(0)
    origin, slope = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator)
    first.earlier_rollouts.observe(FitSums.of(origin, {"kl": slope}, 2).total())
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, second.earlier_rollouts.sums, first.earlier_rollouts.sums))
    second.load_state_dict({"current": 0.1})  # saved by a version without the sums
    assert second.current == 0.1
