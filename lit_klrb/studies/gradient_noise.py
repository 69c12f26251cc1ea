"""Noise of the gradients of KL, reward and objective under several estimators."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import lightning as L
import torch
from torch import Tensor

from lit_klrb import schema
from lit_klrb.data.batches import Batch
from lit_klrb.errors import ConfigurationError, check_at_least, concerning
from lit_klrb.estimators import (
    EstimatorMemory,
    KLEstimator,
    LossWeights,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
)
from lit_klrb.estimators.base import check_different
from lit_klrb.functional import TokenStats, TopK
from lit_klrb.models.generation import Rollout
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.modules.rloo import start_from_warm_start
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import PolicyStudy
from lit_klrb.studies.gradients import REWARD_ALONE, policy_gradient
from lit_klrb.studies.numbers import lower_triangle

# Parameters that are converted to float64 at a time for inner products.
_BLOCK = 1 << 16


@final
class GradientNoiseStudy(PolicyStudy):
    """Computes gradients on independent batches under several estimators and records their inner products.

    Batches differ in prompts and completions; within a batch all estimators use the same. With B batches and
    E estimators, each snapshot has the Gram matrix of (1 + E) B gradients: first those of the reward, then
    those of the objective under each estimator. It determines the variances for KL, reward and objective, and
    differences between the means of two estimators. Memory: (1 + E) B gradients in float32.

    Where training remembers its earlier rollouts (`EstimatorMemory`), the study remembers rollouts of the
    measured policy on other prompts, and like training begins with the token values of the warm start.

    Args:
        estimators: Different estimators to compare; by default MonteCarlo, RaoBlackwell and
            RaoBlackwellControlVariate.
        batches: Independent batches (B).
        prompts_per_batch: Prompts per batch, each with as many completions as in training.
        earlier_rollouts: Rollouts to remember, of `prompts_per_batch` prompts. With 0, the estimator of the
            training has what it remembers there, and estimators that need token values are refused.
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
        check_different(self.estimators)
        with concerning(type(self).__name__):
            check_at_least(4, batches=batches)
            check_at_least(1, prompts_per_batch=prompts_per_batch)
            check_at_least(0, earlier_rollouts=earlier_rollouts)
        self.batches, self.prompts_per_batch = batches, prompts_per_batch
        self.earlier_rollouts = earlier_rollouts

    @property
    def design(self) -> dict[str, Any]:
        """Estimators and batches."""
        return {
            "estimators": [estimator.label for estimator in self.estimators],
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
        gradients = all_gradients(module, self.estimators, measured, earlier, module.seed).flatten(0, 1)
        completions = module.sampling.completions_per_prompt
        return {"beta": module.beta, "completions": completions, "gram": lower_triangle(gram(gradients))}


def all_gradients(
    module: OnPolicyModule,
    estimators: Sequence[KLEstimator],
    batches: Sequence[Batch],
    earlier: Sequence[Batch],
    seed: int,
) -> Tensor:
    """The gradients of `batch_gradients` on B batches, shape [1 + E, B, parameters].

    Args:
        module: Provides policy, reference, reward and beta.
        estimators: E estimators.
        batches: The prompts of each batch.
        earlier: Prompts of the rollouts that the estimators remember, see `memories_after`.
        seed: Seed of the study.
    """
    memories = memories_after(module, estimators, earlier, seed)
    by_batch = [
        batch_gradients(module, batch, memories, derive_seed(seed, schema.GRADIENT_NOISE, index))
        for index, batch in enumerate(batches)
    ]
    return torch.stack(by_batch, dim=1)


def memories_after(
    module: OnPolicyModule, estimators: Sequence[KLEstimator], batches: Sequence[Batch], seed: int
) -> list[EstimatorMemory]:
    """A memory of each estimator, of its warm start and of rollouts of the module's policy.

    Args:
        module: The module.
        estimators: The estimators.
        batches: Prompts of the rollouts; without any, the training's own estimator has the training's memory.
        seed: Seed of the study.

    Raises:
        ConfigurationError: If an estimator would have no token values, and thereby be another one.
    """
    size, trained = module.vocabulary_size, getattr(module, "memory", None)
    memories = [EstimatorMemory(estimator, vocabulary_size=size) for estimator in estimators]
    if not batches:
        memories = [
            trained if trained is not None and trained.estimator == memory.estimator else memory
            for memory in memories
        ]
        needing = [m.estimator for m in memories if m is not trained and m.estimator.needs_token_values]
        if needing:
            raise ConfigurationError(
                f"must be at least 1, got 0: without rollouts to fit token values to, "
                f"{type(needing[0]).__name__} is another estimator",
                key="earlier_rollouts",
            )
    for memory in memories if batches else []:
        start_from_warm_start(memory, module.policy_path)
    for index, batch in enumerate(batches):
        rollout = _sampled(module, batch, derive_seed(seed, schema.GRADIENT_NOISE, "earlier", index))
        with torch.no_grad():
            for memory, stats, _ in weighted(module, memories, batch, *rollout):
                completions, mask, rewards = rollout[0].completions, rollout[0].mask, rollout[1]
                memory.observe(completions, mask, rewards, stats, group_size=module.group_size)
    return memories


def batch_gradients(
    module: OnPolicyModule, batch: Batch, memories: Sequence[EstimatorMemory], seed: int
) -> Tensor:
    """Gradients on the completions of a batch: of the reward, then under each estimator.

    Args:
        module: Provides policy, reference, reward and beta.
        batch: P prompts.
        memories: E estimators with what they remember, which does not change.
        seed: Seed of the completions.

    Returns:
        Shape [1 + E, parameters].
    """
    rollout, rewards = _sampled(module, batch, seed)
    everything = [EstimatorMemory(REWARD_ALONE), *memories]
    return torch.stack(
        [
            policy_gradient(module, memory.estimator, stats, rollout.mask, weights)
            for memory, stats, weights in weighted(module, everything, batch, rollout, rewards)
        ]
    )


def _sampled(module: OnPolicyModule, batch: Batch, seed: int) -> tuple[Rollout, Tensor]:
    """Completions of a batch of prompts, with their training rewards."""
    rollout = module.generate(module.policy, batch, module.sampling, seed=seed)
    return rollout, module.training_rewards(rollout, module.rewards(rollout, batch))


def weighted(
    module: OnPolicyModule,
    memories: Sequence[EstimatorMemory],
    batch: Batch,
    rollout: Rollout,
    rewards: Tensor,
) -> Iterator[tuple[EstimatorMemory, TokenStats, LossWeights]]:
    """Each memory with the statistics and its weights of a rollout; equal statistics are computed once.

    Args:
        module: Provides policy, reference and beta.
        memories: Estimators with what they remember.
        batch: The prompts, and those that the reference reads.
        rollout: The completions.
        rewards: Their training rewards, shape [B].
    """
    states = module.scorer.reference_states(module.as_read(rollout, batch))
    to_come = module.reward_to_come(rollout, batch, rewards)
    found: list[tuple[TopK | None, Tensor | None, TokenStats]] = []
    # Those with token values first, as the others can use the same statistics
    for memory in sorted(memories, key=lambda memory: memory.token_values is None):
        if _suitable(found, memory) is None:
            topk, table = memory.estimator.topk, memory.token_values
            computed = module.scorer.stats(rollout, states, table, topk)
            found.append((topk, table, computed._replace(reward_to_come=to_come)))
    settings: dict[str, Any] = {"beta": module.beta, "group_size": module.group_size}
    for memory in memories:
        stats = _suitable(found, memory)
        assert stats is not None
        tokens, mask = rollout.completions, rollout.mask
        yield memory, stats, memory.weights(stats.detach(), mask, rewards, **settings, tokens=tokens)


def _suitable(
    found: Sequence[tuple[TopK | None, Tensor | None, TokenStats]], memory: EstimatorMemory
) -> TokenStats | None:
    """The statistics that a memory needs, or with token values that its estimator ignores."""
    own, ignores = memory.token_values, memory.estimator.token_values_predict is None
    for topk, table, stats in found:
        same = table is own is None or (table is not None and own is not None and torch.equal(table, own))
        if topk == memory.estimator.topk and (same or ignores):
            return stats
    return None


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
