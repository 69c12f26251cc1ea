"""Noise and signal of the gradients of reward, KL and objective, estimated from the prompts of a rollout."""

from functools import partial
from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.studies.base import require_rollouts
from lit_klrb.studies.gradients import REWARD_ALONE, TERMS, noise_and_signal, policy_gradient


@final
class GradientNoiseMonitor(L.Callback):
    """Logs the noise and the signal of the gradients of reward, KL and objective.

    Each prompt of a rollout gives an independent gradient g, and a step uses the mean over P prompts. For
    each term, `train/gradient_noise_*` is the trace of the covariance of that mean, tr Cov(g) / P, and
    `train/gradient_snr_*` is the squared norm of its expectation, estimated without bias, divided by the
    noise: below 1, a step is mostly noise. `train/gradient_kl_share` is the KL's share of the noise of reward
    and KL. The terms are defined in `lit_klrb.studies.gradients`, as for `GradientNoiseStudy`. The KL's is
    the objective's less the reward's, and so includes the control variates of `RaoBlackwellControlVariate`.

    Measurements take place at the first step on a rollout, before the policy changes, and affect neither the
    step nor any random number. Each costs about two more forward and backward passes over the rollout.

    Args:
        every_n_rollouts: Number of rollouts between measurements.
    """

    def __init__(self, every_n_rollouts: int = 10) -> None:
        if every_n_rollouts < 1:
            raise ConfigurationError(
                f"GradientNoiseMonitor: every_n_rollouts must be at least 1, got {every_n_rollouts}"
            )
        self.every_n_rollouts = every_n_rollouts
        self._due = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the module has rollouts and the command trains."""
        require_rollouts(self, trainer, pl_module, stage)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Decide whether to measure: at the first step on every n-th rollout."""
        number, step = divmod(batch_idx, pl_module.steps_per_batch)
        self._due = step == 0 and number % self.every_n_rollouts == 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measure and log, if due."""
        if not self._due:
            return
        self._due = False
        *totals, count = prompt_gradients(pl_module)
        sums, squares = (trainer.strategy.reduce(total, reduce_op="sum") for total in totals)
        values = noise_and_signal(sums, squares, count * trainer.world_size)
        # Not pl_module.log: Lightning would repeat the values at every step until the next measurement
        for logger in trainer.loggers:
            logger.log_metrics({f"train/gradient_{k}": v for k, v in values.items()}, trainer.global_step)


def prompt_gradients(module: OnPolicyModule) -> tuple[Tensor, Tensor, int]:
    """Sums of the gradients of the prompts in this process's rollout, and of their squared norms.

    Args:
        module: The module with its current rollout.

    Returns:
        Sums over prompts of the gradients of reward, KL and objective, shape [3, parameters], and of their
        squared norms, [3], and the number of prompts.
    """
    experience, group_size = module.experience, module.sampling.completions_per_prompt
    assert experience is not None
    with torch.no_grad():
        stats = module.pair.scorer.stats(experience.rollout, experience.reference_states)
    reward_alone = experience._replace(
        weights=REWARD_ALONE.weights(
            stats, experience.rollout.mask, experience.rewards, beta=module.beta, group_size=group_size
        )
    )
    gradient_of = partial(policy_gradient, module.policy, module.beta)
    parameters = module.policy.num_parameters(only_trainable=True)
    sums = torch.zeros(len(TERMS), parameters, device=module.device)
    squares = torch.zeros(len(TERMS), device=module.device)
    starts = range(0, len(experience.rewards), group_size)
    for start in starts:
        # Rows of the whole rollout's weights: the estimator may have fitted coefficients on other prompts
        prompt, prompt_reward = (e.rows(slice(start, start + group_size)) for e in (experience, reward_alone))
        mask = prompt.rollout.mask
        rollout, states = prompt.rollout, prompt.reference_states
        stats = module.pair.scorer.stats(rollout, states, experience.token_values, module.kl_estimator.topk)
        reward = gradient_of(REWARD_ALONE, stats, mask, prompt_reward.weights)
        total = gradient_of(module.kl_estimator, stats, mask, prompt.weights)
        terms = torch.stack([reward, total - reward, total])
        sums += terms
        squares += terms.square().sum(1)
    return sums, squares, len(starts)
