"""Noise of the gradients of KL, reward and objective under several estimators."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.data.batches import Batch
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator, MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.estimators.cross_fit import EarlierRollouts
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.functional import TopK
from lit_klrb.modules.rloo import OnPolicyModule
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import PolicyStudy
from lit_klrb.studies.gradients import REWARD_ALONE, policy_gradient
from lit_klrb.studies.numbers import rounded

# Parameters that are converted to float64 at a time for inner products.
_BLOCK = 1 << 16


@final
class GradientNoiseStudy(PolicyStudy):
    """Computes gradients on independent batches under several estimators and records their inner products.

    Batches differ in prompts and completions; within a batch all estimators use the same. With B batches and
    E estimators, each snapshot has the Gram matrix of (1 + E) B gradients: first those of the reward, then
    those of the objective under each estimator. It determines the variances for KL, reward and objective, and
    differences between the means of two estimators. Memory: (1 + E) B gradients in float32.

    Training fits token values and the coefficients of RaoBlackwellControlVariate on its earlier rollouts; the
    study fits them on rollouts of the measured policy on other prompts. Other estimators do not depend on it.

    Args:
        estimators: Estimators to compare; MonteCarlo, RaoBlackwell and RaoBlackwellControlVariate by default.
        batches: Independent batches (B).
        prompts_per_batch: Prompts per batch, each with as many completions as in training.
        earlier_rollouts: Rollouts, of `prompts_per_batch` prompts, for these fits; with 0, those of the
            training are used if its estimator has any.
        at: When to measure, as fractions of the run's steps: 0 before the first, 1 after the last.
    """

    name = schema.GRADIENT_NOISE

    def __init__(
        self,
        estimators: list[KLEstimator] | None = None,
        batches: int = 64,
        prompts_per_batch: int = 8,
        earlier_rollouts: int = 8,
        at: Sequence[float] = (0.0, 0.5, 1.0),
    ) -> None:
        super().__init__(at)
        self.estimators = estimators or [MonteCarlo(), RaoBlackwell(), RaoBlackwellControlVariate()]
        if batches < 4:
            raise ConfigurationError(f"GradientNoiseStudy: batches must be at least 4, got {batches}")
        if prompts_per_batch < 1:
            raise ConfigurationError(
                f"GradientNoiseStudy: prompts_per_batch must be at least 1, got {prompts_per_batch}"
            )
        if earlier_rollouts < 0:
            raise ConfigurationError(
                f"GradientNoiseStudy: earlier_rollouts must be at least 0, got {earlier_rollouts}"
            )
        self.batches, self.prompts_per_batch = batches, prompts_per_batch
        self.earlier_rollouts = earlier_rollouts

    @property
    def design(self) -> dict[str, Any]:
        """Estimators and batches."""
        return {
            "estimators": [type(estimator).__name__ for estimator in self.estimators],
            "batches": self.batches,
            "prompts": self.prompts_per_batch,
            "earlier_rollouts": self.earlier_rollouts,
        }

    def measure(self, trainer: L.Trainer, module: OnPolicyModule) -> dict[str, Any]:
        """beta, and the lower triangle of the Gram matrix, row by row."""
        count = self.batches + self.earlier_rollouts
        prompts = self.prompts(trainer, module, count, self.prompts_per_batch)
        # The measured batches come first: they do not depend on the number of earlier rollouts
        measured, earlier = prompts[: self.batches], prompts[self.batches :]
        with fitted_to_rollouts(module, earlier, module.seed):
            by_batch = [self._gradients(module, batch, index) for index, batch in enumerate(measured)]
        gradients = torch.stack(by_batch, dim=1).flatten(0, 1)
        matrix = gram(gradients)
        triangle = [rounded(row[: index + 1], 7) for index, row in enumerate(matrix)]
        completions = module.sampling.completions_per_prompt
        return {"beta": module.beta, "completions": completions, "gram": triangle}

    def _gradients(self, module: OnPolicyModule, batch: Batch, index: int) -> Tensor:
        """Gradients on one batch: of the reward, then under each estimator, shape [1 + E, parameters]."""
        return batch_gradients(module, batch, self.estimators, derive_seed(module.seed, self.name, index))


@contextmanager
def fitted_to_rollouts(module: OnPolicyModule, batches: Sequence[Batch], seed: int) -> Iterator[None]:
    """Replace what the module has fitted on earlier rollouts by fits to new ones, within the block.

    Args:
        module: The module; unchanged without batches.
        batches: Prompts of the rollouts.
        seed: Seed of the study.
    """
    before = module.token_values, module.earlier_rollouts
    if batches:
        module.token_values, module.earlier_rollouts = TokenValues(), EarlierRollouts()
        for index, batch in enumerate(batches):
            _observe(module, batch, derive_seed(seed, schema.GRADIENT_NOISE, "earlier", index))
        module.fit_token_values()
    try:
        yield
    finally:
        module.token_values, module.earlier_rollouts = before


@torch.no_grad()
def _observe(module: OnPolicyModule, batch: Batch, seed: int) -> None:
    """Add a rollout to the data of later fits, as training does."""
    values, earlier = module.token_values, module.earlier_rollouts
    assert values is not None
    assert earlier is not None
    group_size, estimator = module.sampling.completions_per_prompt, RaoBlackwellControlVariate()
    rollout = module.generate(module.policy, batch, module.sampling, seed=seed)
    _, stats = module.score(rollout, module.fit_token_values())
    rewards = module.training_rewards(rollout, module.rewards(rollout, batch))
    earlier.observe(estimator.fit_sums(stats, rollout.mask, rewards, beta=module.beta, group_size=group_size))
    values.observe(rollout.completions, rollout.mask, rewards, group_size)


def batch_gradients(
    module: OnPolicyModule, batch: Batch, estimators: Sequence[KLEstimator], seed: int
) -> Tensor:
    """Gradients on the completions of a batch: of the reward, then under each estimator.

    Args:
        module: Provides policy, reference, reward, beta, and what was fitted on earlier rollouts.
        batch: P prompts.
        estimators: E estimators.
        seed: Seed of the completions.

    Returns:
        Shape [1 + E, parameters].
    """
    group_size, earlier = module.sampling.completions_per_prompt, module.earlier_rollouts
    rollout = module.generate(module.policy, batch, module.sampling, seed=seed)
    rewards = module.training_rewards(rollout, module.rewards(rollout, batch))
    reference_states = module.scorer.reference_states(rollout)
    everything = (REWARD_ALONE, *estimators)
    predicted = None if module.token_values is None else module.token_values.predicted

    def needed(estimator: KLEstimator) -> tuple[TopK | None, bool]:
        """The head that it reads, and whether the token values predict what it needs."""
        return estimator.topk, estimator.token_values_predict in (None, predicted)

    by_need = {
        (topk, valued): module.scorer.stats(
            rollout, reference_states, module.token_value_table if valued else None, topk
        )
        for topk, valued in set(map(needed, everything))
    }
    settings: dict[str, Any] = {"beta": module.beta, "group_size": group_size}
    gradients = []
    for estimator in everything:
        stats = by_need[needed(estimator)]
        if earlier is not None and isinstance(estimator, RaoBlackwellControlVariate):
            weights = estimator.weights_after(earlier.sums, stats, rollout.mask, rewards, **settings)
        else:
            weights = estimator.weights(stats, rollout.mask, rewards, **settings)
        gradients.append(policy_gradient(module, estimator, stats, rollout.mask, weights))
    return torch.stack(gradients)


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows, shape [n, n], in float64.

    Args:
        gradients: Shape [n, parameters].

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 3.0]])).tolist()
        [[5.0, 6.0], [6.0, 9.0]]
    """
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64, device=gradients.device)
    # In blocks of columns, as a float64 copy of all gradients takes twice their memory
    for block in torch.split(gradients, _BLOCK, dim=1):
        columns = block.double()
        total += columns @ columns.mT
    return total
