"""Noise and signal of the gradients of reward, KL and objective, from the prompts of a rollout."""

from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.modules.rloo import OnPolicyModule
from lit_klrb.studies.gradients import REWARD_ALONE, TERMS, noise_and_signal, policy_gradient
from lit_klrb.studies.rollouts import require_rollouts


@final
class GradientNoiseMonitor(L.Callback):
    """Logs the noise and the signal of the gradients of reward, KL and objective.

    Each prompt of a rollout gives an independent gradient g, and a step takes the mean over P prompts. Logged
    for each term are `train/gradient_noise_*`, the trace of the covariance of that mean, tr Cov(g) / P, and
    `train/gradient_snr_*`, the squared length of its expectation, estimated without bias, over the noise:
    below 1 a step is mostly noise. `train/gradient_kl_share` is the KL's part of the noise of reward and KL.
    The terms are those of `GradientNoiseStudy`: see `lit_klrb.studies.gradients`.

    It measures at the first step on a rollout, before the policy moves, and changes neither the step nor any
    draw. A measurement costs about two more forward and backward passes over the rollout.

    Args:
        every_n_rollouts: Rollouts from one measurement to the next.
    """

    def __init__(self, every_n_rollouts: int = 10) -> None:
        if every_n_rollouts < 1:
            raise ConfigurationError(
                f"GradientNoiseMonitor: every_n_rollouts must be at least 1, got {every_n_rollouts}"
            )
        self.every_n_rollouts = every_n_rollouts
        self._due = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts, and a command that does not train."""
        require_rollouts(self, trainer, pl_module, stage)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note whether this is the first step on a rollout to be measured."""
        number, step = divmod(batch_idx, pl_module.steps_per_batch)
        self._due = step == 0 and number % self.every_n_rollouts == 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measure, and log."""
        if not self._due:
            return
        self._due = False
        *totals, count = prompt_gradients(pl_module)
        sums, squares = (trainer.strategy.reduce(total, reduce_op="sum") for total in totals)
        values = noise_and_signal(sums, squares, count * trainer.world_size)
        # Lightning would log what the module logs here again at every step until the next measurement.
        for logger in trainer.loggers:
            logger.log_metrics({f"train/gradient_{k}": v for k, v in values.items()}, trainer.global_step)


def prompt_gradients(module: OnPolicyModule) -> tuple[Tensor, Tensor, int]:
    """First and second moments of the gradients of the prompts in this process's rollout.

    Args:
        module: The rollout, and the policy that sampled it.

    Returns:
        Sums over prompts of the gradients of reward, KL and objective, [3, parameters], and of their squared
        lengths, [3]; the number of prompts.
    """
    experience, group_size = module.experience, module.sampling.completions_per_prompt
    assert experience is not None
    with torch.no_grad():
        stats = module.scorer.stats(experience.rollout, experience.reference_states)
    reward_alone = experience._replace(
        weights=REWARD_ALONE.weights(
            stats, experience.rollout.mask, experience.rewards, beta=module.beta, group_size=group_size
        )
    )
    parameters = module.policy.num_parameters(only_trainable=True)
    sums = torch.zeros(len(TERMS), parameters, device=module.device)
    squares = torch.zeros(len(TERMS), device=module.device)
    starts = range(0, len(experience.rewards), group_size)
    for start in starts:
        # Weights are those of the whole rollout: the estimator may have fitted coefficients on other prompts.
        prompt, prompt_reward = (e.rows(slice(start, start + group_size)) for e in (experience, reward_alone))
        mask = prompt.rollout.mask
        stats = module.scorer.stats(prompt.rollout, prompt.reference_states)
        reward = policy_gradient(module, REWARD_ALONE, stats, mask, prompt_reward.weights)
        total = policy_gradient(module, module.kl_estimator, stats, mask, prompt.weights)
        terms = torch.stack([reward, total - reward, total])
        sums += terms
        squares += terms.square().sum(1)
    return sums, squares, len(starts)
