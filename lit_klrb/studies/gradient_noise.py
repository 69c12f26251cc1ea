"""Noise of the gradients of KL, reward and objective under several estimators.

The gradient of the objective is that of the estimator's loss. The gradient of the reward is that of `NoKL`
for all estimators: another estimator at beta 0 may fit coefficients, which then act as a baseline of the
reward. The gradient of the KL is the difference of the two.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lit_klrb import schema
from lit_klrb.data.batches import Batch
from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError, check_at_least, concerning
from lit_klrb.estimators import (
    EstimatorMemory,
    KLEstimator,
    LossWeights,
    MonteCarlo,
    NoKL,
    RaoBlackwell,
    RaoBlackwellControlVariate,
)
from lit_klrb.estimators.labels import check_different
from lit_klrb.functional import TokenStats, TopK
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.on_policy import OnPolicyModule
from lit_klrb.rollouts.pair import Pair
from lit_klrb.rollouts.step import Scored, begin, handed_over, weigh
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.base import PolicyStudy, lower_triangle

# Parameters that are converted to float64 at a time for inner products.
_BLOCK = 1 << 16
# What statistics have sums for: a head, and the weight of a Jensen-Shannon divergence
Sums = tuple[TopK | None, float | None]


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
        self.needs = (batches + earlier_rollouts, prompts_per_batch)

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
        prompts = self.prompts(trainer, module, *self.needs)
        # The measured batches come first: they do not depend on the number of earlier rollouts
        measured, earlier = prompts[: self.batches], prompts[self.batches :]
        task = Task.of(module)
        gradients = all_gradients(task, self.estimators, measured, earlier, module.seed).flatten(0, 1)
        completions = module.sampling.completions_per_prompt
        return {"beta": module.beta, "completions": completions, "gram": lower_triangle(gram(gradients))}


class Task(NamedTuple):
    """What is sampled and weighted."""

    pair: Pair
    sampling: Sampling
    beta: float  # weight of the KL
    # The training rewards of a rollout of a batch of prompts, shape [B]
    rewards: Callable[[Rollout, Batch], Tensor]
    policy_path: str | None  # the warm start
    # `TokenStats.reward_to_come` of a rollout, its batch and its rewards; None for none
    to_come: Callable[[Rollout, Batch, Tensor], Tensor | None] = lambda *_: None
    memory: EstimatorMemory | None = None  # what the training remembers; None without a training
    reward_scale: Callable[[Tensor], Tensor] = torch.ones_like  # see `weigh`
    prompts: int = 1  # at least so many prompts have their completions sampled together, as in training

    @classmethod
    def of(cls, module: OnPolicyModule) -> "Task":
        """The task that a module trains on."""

        def rewards(rollout: Rollout, batch: Batch) -> Tensor:
            return module.training_rewards(rollout, module.pair.rewards(module.reward, rollout, batch))

        pair, sampling, path = module.pair, module.sampling, module.policy_path
        prompts = getattr(getattr(module.trainer, "datamodule", None), "batch_size", 1)
        training = module.beta, rewards, path, module.reward_to_come, module.memory, module.reward_scale
        return cls(pair, sampling, *training, prompts)


def all_gradients(
    task: Task,
    estimators: Sequence[KLEstimator],
    batches: Sequence[Batch],
    earlier: Sequence[Batch],
    seed: int,
) -> Tensor:
    """The gradients of `batch_gradients` on B batches, shape [1 + E, B, parameters]."""
    memories = memories_after(task, estimators, earlier, seed)
    rollouts = sampled(task, batches, seed)
    return torch.stack([batch_gradients(task, *one, memories) for one in rollouts], dim=1)


def sampled(
    task: Task, batches: Sequence[Batch], seed: int, *address: str
) -> Iterator[tuple[Batch, Rollout]]:
    """Each of some batches of equal size with its completions.

    A small batch takes as long to sample as one of training: as many as make one are sampled together.
    """
    size = len(batches[0]["tokens"]) if batches else 1
    together, rows = max(1, task.prompts // size), size * task.sampling.completions_per_prompt
    for first in range(0, len(batches), together):
        group = batches[first : first + together]
        width = max(batch["tokens"].shape[1] for batch in group)
        joined = {
            name: torch.cat([pad(batch[name], (width - batch[name].shape[1], 0)) for batch in group])
            for name in ("tokens", "attention_mask")
        }
        own = derive_seed(seed, schema.GRADIENT_NOISE, *address, first)
        rollout = task.pair.sample(joined, task.sampling, seed=own)
        for number, batch in enumerate(group):
            yield batch, rollout.rows(slice(number * rows, (number + 1) * rows))


def memories_after(
    task: Task, estimators: Sequence[KLEstimator], batches: Sequence[Batch], seed: int
) -> list[EstimatorMemory]:
    """A memory of each estimator, of its warm start and of the policy's rollouts on batches of prompts.

    Without any, the training's own estimator has the training's memory, and estimators that would have no
    token values, and thereby be others, are refused.
    """
    trained, path = task.memory, task.policy_path if batches else None
    memories = [EstimatorMemory(estimator) for estimator in estimators]
    for memory in memories:
        begin(memory, task.pair.vocabulary_size, handed_over(memory, path))
    if not batches:
        memories = [trained if trained and trained.estimator == m.estimator else m for m in memories]
        needing = [m.estimator for m in memories if m is not trained and m.estimator.needs_token_values]
        if needing:
            raise ConfigurationError(
                f"must be at least 1, got 0: without rollouts to fit token values to, "
                f"{type(needing[0]).__name__} is another estimator",
                key="earlier_rollouts",
            )
    with torch.no_grad():
        for batch, rollout in sampled(task, batches, seed, "earlier"):
            list(weighted(task, memories, batch, rollout, observe=True))
    return memories


def batch_gradients(
    task: Task, batch: Batch, rollout: Rollout, memories: Sequence[EstimatorMemory]
) -> Tensor:
    """Gradients on the completions of a batch, shape [1 + E, parameters].

    The first is that of the reward, the others those under each estimator.
    """
    everything, gradients = [EstimatorMemory(NoKL()), *memories], []
    for memory, stats, mask, weights in weighted(task, everything, batch, rollout):
        scored = stats, mask, weights
        gradients.append(policy_gradient(task.pair.policy, task.beta, memory.estimator, *scored))
    return torch.stack(gradients)


def policy_gradient(
    policy: nn.Module,
    beta: float,
    estimator: KLEstimator,
    stats: TokenStats,
    mask: Tensor,
    weights: LossWeights,
) -> Tensor:
    """Gradient of an estimator's loss with respect to the trained parameters, shape [parameters].

    The graph of the statistics is retained, for other estimators.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    loss = estimator.loss(stats, mask, weights, beta=beta)
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.nn.utils.parameters_to_vector(gradients)


def weighted(
    task: Task, memories: Sequence[EstimatorMemory], batch: Batch, rollout: Rollout, *, observe: bool = False
) -> Iterator[tuple[EstimatorMemory, TokenStats, Tensor, LossWeights]]:
    """Each memory with statistics, mask and its weights of the same rollout.

    Equal statistics are computed once.
    """
    scorer = task.pair.scorer
    rewards = task.rewards(rollout, batch)
    states = task.pair.states(rollout, batch)
    to_come = task.to_come(rollout, batch, rewards)
    statistics: list[tuple[Sums, Tensor | None, TokenStats]] = []
    # Those with token values first, as the others can use the same statistics
    for memory in sorted(memories, key=lambda memory: memory.token_values is None):
        if _suitable(statistics, memory) is None:
            sums, table = _sums(memory), memory.token_values
            computed = scorer.stats(rollout, states, table, *sums)
            statistics.append((sums, table, computed._replace(reward_to_come=to_come)))
    count = task.sampling.completions_per_prompt
    settings: dict[str, Any] = {"beta": task.beta, "group_size": count, "observe": observe}
    settings["reward_scale"] = task.reward_scale
    for memory in memories:
        stats = _suitable(statistics, memory)
        assert stats is not None
        scored = Scored(rollout.completions, rollout.mask, stats.detach(), rewards)
        yield memory, stats, rollout.mask, weigh(memory, scored, **settings)


def _sums(memory: EstimatorMemory) -> Sums:
    return memory.estimator.topk, memory.estimator.reads_jsd


def _suitable(
    statistics: Sequence[tuple[Sums, Tensor | None, TokenStats]], memory: EstimatorMemory
) -> TokenStats | None:
    """The statistics that a memory needs, or with token values that its estimator ignores."""
    own, ignores = memory.token_values, memory.estimator.token_values_predict is None
    for sums, table, stats in statistics:
        same = table is own is None or (table is not None and own is not None and torch.equal(table, own))
        if sums == _sums(memory) and (same or ignores):
            return stats
    return None


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows, shape [n, n], in float64.

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
