"""How much of a gradient is signal: reward, KL and objective apart, from the prompts of a rollout."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import LossWeights
from lit_klrb.modules.rloo import Experience, RLOOModule
from lit_klrb.studies.rollouts import RolloutCallback

TERMS = ("reward", "kl", "total")


class GradientNoiseMonitor(RolloutCallback):
    """Logs the noise and the signal of the gradients of reward, KL and objective.

    Each prompt of a rollout gives an independent gradient g; a step takes the mean of P of them. Logged are,
    for each term, `train/gradient_noise_*`, the trace of that mean's covariance, tr Cov(g) / P, and
    `train/gradient_snr_*`, the squared length of its expectation, estimated without bias, divided by the
    noise: below 1 a step is mostly noise. `train/gradient_kl_share` is the KL term's part of the noise of
    both terms taken apart.

    It looks at the first step on a rollout, before the policy moves, and touches neither the step nor any
    draw; a look costs about two more backward passes over the rollout.

    Args:
        every_n_rollouts: How often to look.
    """

    def __init__(self, every_n_rollouts: int = 10) -> None:
        if every_n_rollouts < 1:
            raise ConfigurationError(
                f"GradientNoiseMonitor: every_n_rollouts must be at least 1, got {every_n_rollouts}"
            )
        self.every_n_rollouts = every_n_rollouts
        self._due = False

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Whether a rollout to look at begins."""
        number, step = divmod(batch_idx, pl_module.steps_per_batch)
        self._due = step == 0 and number % self.every_n_rollouts == 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Look, and log."""
        if not self._due:
            return
        self._due = False
        group_size = pl_module.sampling.completions_per_prompt
        *moments, count = prompt_gradients(pl_module, group_size)
        sums, squares = (trainer.strategy.reduce(moment, reduce_op="sum") for moment in moments)
        found = summary(sums, squares, count * trainer.world_size)
        # Lightning would repeat what the module logs here in every step until the next look.
        for logger in trainer.loggers:
            logger.log_metrics({f"train/gradient_{k}": v for k, v in found.items()}, trainer.global_step)


def prompt_gradients(module: RLOOModule, group_size: int) -> tuple[Tensor, Tensor, int]:
    """Moments of the gradients of the prompts in the rollout at hand.

    Args:
        module: Holds the rollout, and the policy it was drawn from.
        group_size: Completions of each prompt.

    Returns:
        The sums over prompts of the terms' gradients, [3, parameters], of their squared lengths, [3], and how
        many prompts there are.
    """
    experience = module.experience
    assert experience is not None
    parameters = [p for p in module.policy.parameters() if p.requires_grad]
    without_kl = experience._replace(weights=_weights_without_kl(module, experience, group_size))
    sums, squares = (
        torch.zeros(3, sum(p.numel() for p in parameters), device=module.device),
        torch.zeros(3, device=module.device),
    )
    starts = range(0, len(experience.rewards), group_size)
    for start in starts:
        rows = slice(start, start + group_size)
        losses = module.loss_of(without_kl.rows(rows), beta=0.0), module.loss_of(experience.rows(rows))
        reward, total = (_flat_gradient(loss, parameters) for loss in losses)
        for index, gradient in enumerate((reward, total - reward, total)):
            sums[index] += gradient
            squares[index] += gradient.square().sum()
    return sums, squares, len(starts)


def summary(sums: Tensor, squares: Tensor, count: int) -> dict[str, float]:
    """Noise and signal-to-noise ratio of the terms, and the KL's share of the noise.

    Args:
        sums: Of the prompts' gradients, [3, parameters], the terms being reward, KL and their sum.
        squares: Sums of the squared lengths of the prompts' gradients, [3].
        count: Prompts.

    Example:
        >>> gradients = torch.tensor([[3.0, 1.0], [1.0, 1.0]])          # two prompts, the same for all terms
        >>> found = summary(gradients.sum(0).expand(3, 2), gradients.square().sum().expand(3), count=2)
        >>> found["noise_total"], found["snr_total"], found["kl_share"]
        (1.0, 4.0, 0.5)
    """
    mean_squares = (sums / count).square().sum(1).cpu()
    noise = (squares / count - mean_squares) / (count - 1)
    snr = (mean_squares - noise) / noise
    found = {f"noise_{name}": value.item() for name, value in zip(TERMS, noise, strict=True)}
    found |= {f"snr_{name}": value.item() for name, value in zip(TERMS, snr, strict=True)}
    return found | {"kl_share": (noise[1] / (noise[0] + noise[1])).item()}


@torch.no_grad()
def _weights_without_kl(module: RLOOModule, experience: Experience, group_size: int) -> LossWeights:
    stats = module.scorer.stats(experience.rollout, experience.reference_states)
    return module.kl_estimator.weights(
        stats, experience.rollout.mask, experience.rewards, beta=0.0, group_size=group_size
    )


def _flat_gradient(loss: Tensor, parameters: list[Any]) -> Tensor:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten()
            for p, g in zip(parameters, gradients, strict=True)
        ]
    )
