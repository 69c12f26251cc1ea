"""Schedules of beta and of the discount, and the controller of beta."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.estimators import MonteCarlo, RaoBlackwell
from lit_klrb.modules.on_policy import OnPolicyModule


def betas(callback, kls, max_steps=10):
    """beta at each step, with two steps per rollout; `kls` are the KLs of the rollouts."""
    module = Mock(OnPolicyModule, uses_kl_estimator=True, steps_per_batch=2)
    seen = []
    for step in range(2 * len(kls) + 2):
        trainer = SimpleNamespace(global_step=step, max_steps=max_steps)
        callback.on_train_batch_start(trainer, module, {}, step)
        seen.append(module.beta)
        module.last_rollout = ([*kls, 1.0][step // 2], 8)
        callback.on_train_batch_end(trainer, module, {}, {}, step)
    return seen


def test_a_fixed_beta_stays():
    assert betas(KLEstimatorCallback(MonteCarlo(), 0.3), [1.0, 5.0]) == [0.3] * 6


def test_a_line_from_the_first_to_the_final_beta_in_steps_of_a_rollout():
    seen = betas(KLEstimatorCallback(MonteCarlo(), 1.0, final_beta=0.0), [1.0, 1.0])
    assert seen == pytest.approx([1.0, 1.0, 0.8, 0.8, 0.6, 0.6])


def test_the_controller_raises_beta_above_the_target_lowers_it_below_and_is_cut():
    callback = KLEstimatorCallback(MonteCarlo(), 1.0, target_kl=2.0, horizon=80)
    seen = betas(callback, [2.2, 100.0, 1.9, 0.0])
    factors = [1.0, 1 + 0.1 * 0.1, 1 + 0.2 * 0.1, 1 - 0.05 * 0.1, 1 - 0.2 * 0.1]
    expected, beta = [], 1.0
    for factor in factors:
        beta *= factor
        expected += [beta, beta]
    assert seen == pytest.approx(expected)
    other = KLEstimatorCallback(MonteCarlo(), 1.0, target_kl=2.0, horizon=80)
    other.load_state_dict(callback.state_dict())
    assert other.current == callback.current


def test_lines_from_the_estimators_settings_to_the_final_ones_in_steps_of_a_rollout():
    estimator, finals = (
        RaoBlackwell(discount=0.0, forward_share=1.0),
        {"final_discount": 1.0, "final_forward_share": 0.0},
    )
    callback, logged = KLEstimatorCallback(estimator, **finals), {}
    module = Mock(OnPolicyModule, uses_kl_estimator=True, steps_per_batch=2, log=logged.__setitem__)
    seen = []
    # The last step is resumed in the middle of a rollout, by a callback that has not seen its start
    for step in (0, 1, 2, 9):
        callback = callback if step < 9 else KLEstimatorCallback(estimator, **finals)
        callback.on_train_batch_start(SimpleNamespace(global_step=step, max_steps=10), module, {}, step)
        seen.append(callback.memory.estimator.discount)
    assert seen == pytest.approx([0.0, 0.0, 0.2, 0.8])
    assert logged == {"train/beta": 0.07, "train/discount": 0.8, "train/forward_share": pytest.approx(0.2)}
    assert replace(callback.memory.estimator, discount=0.0, forward_share=1.0) == estimator
