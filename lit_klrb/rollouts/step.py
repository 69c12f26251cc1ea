"""A step on a rollout: token values, statistics, weights, loss, and what the estimator remembers of it.

The order is `begin` once, then for each rollout `Pair.score` with the memory's token values, `weigh`, which
lets the memory observe the rollout after weighting it, and `policy_loss` on any part of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.distributed import gather_rows
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, KLEstimator, LossWeights
from lit_klrb.estimators.checked import checked_loss
from lit_klrb.functional import TokenStats
from lit_klrb.functional.baselines import values_before
from lit_klrb.models import loading
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.rollouts.teachers import TeacherStates


def handed_over(memory: EstimatorMemory, policy_path: str | None) -> Tensor | None:
    """Token values that a warm start fitted to its rewards; None without any, or if they are not used."""
    if policy_path is None or memory.estimator.token_values_predict != "rewards":
        return None
    return loading.load_token_values("policy_path", policy_path)


def begin(memory: EstimatorMemory, vocabulary_size: int, prior: Tensor | None = None) -> None:
    """Give a memory a value for every token, V of them, see `Pair`; at first those `handed_over`."""
    memory.vocabulary_size = vocabulary_size
    if prior is not None:
        memory.start_from(prior[:vocabulary_size])


def reward_to_come(
    rollout: Rollout, rewards: Tensor, every: int, reward_of: Callable[[Rollout], Tensor]
) -> Tensor:
    """`TokenStats.reward_to_come`: the reward less that of the completion before each token, shape [B, T].

    Args:
        rollout: B sequences with T completion positions.
        rewards: Their rewards, shape [B].
        every: The number of tokens between two places at which an unfinished completion is scored.
        reward_of: The rewards of such completions.
    """
    before = values_before(rollout.mask, every, lambda length: reward_of(rollout.cut(length)))
    return torch.where(rollout.mask, rewards[:, None] - before, 0)


class Scored(NamedTuple):
    """Completions with what the estimator weights them by, whole groups, prompt-major.

    Args:
        tokens: Their token ids, shape [B, T].
        mask: True on completion tokens, shape [B, T].
        stats: Their statistics, detached, fields [B, T].
        rewards: Their rewards, shape [B]; None for the KL alone.
    """

    tokens: Tensor
    mask: Tensor
    stats: TokenStats
    rewards: Tensor | None

    @classmethod
    def everyones(cls, rollout: Rollout, stats: TokenStats, rewards: Tensor) -> "Scored":
        """Gather the completions of all processes."""
        stats = stats.detach().map(gather_rows)
        return cls(gather_rows(rollout.completions), gather_rows(rollout.mask), stats, gather_rows(rewards))


def weigh(
    memory: EstimatorMemory,
    scored: Scored,
    *,
    beta: float,
    group_size: int,
    observe: bool = True,
    reward_scale: Callable[[Tensor], Tensor] = torch.ones_like,
) -> LossWeights:
    """The estimator's weights of the loss; the estimator observes the completions for later rollouts.

    `reward_scale` gives a factor of each reward, and of the reward to come; the KL keeps its weight.
    """
    tokens, mask, stats, rewards = scored
    if rewards is not None:
        scale = reward_scale(rewards)
        rewards = scale * rewards
        if stats.reward_to_come is not None:
            stats = stats._replace(reward_to_come=scale[:, None] * stats.reward_to_come)
    weights = memory.weights(stats, mask, rewards, beta=beta, group_size=group_size, tokens=tokens)
    if observe:
        memory.observe(tokens, mask, rewards, stats, group_size=group_size)
    return weights


def policy_loss(
    scorer: Scorer,
    estimator: KLEstimator,
    rollout: Rollout,
    reference_states: Tensor,
    weights: LossWeights,
    *,
    beta: float,
    behaviour_logprobs: Tensor,
    token_values: Tensor | None = None,
    stats: TokenStats | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The estimator's loss on sequences of a weighted rollout, averaged over them.

    Returns the loss, and `KLEstimator.effective_share`.

    Its gradients are formed while the logits exist, if the estimator's loss is of that form.

    Args:
        scorer: Policy and reference.
        estimator: The estimator.
        rollout: B of the sequences.
        reference_states: Those of `Pair.score` for them.
        weights: Their weights, shape [B, T].
        beta: Weight of the KL.
        behaviour_logprobs: Log-probabilities under the policy that sampled them, shape [B, T].
        token_values: Those with which the rollout was weighted, shape [V]; None without.
        stats: Their statistics with a graph, which spare another forward pass of the policy.
    """
    if stats is None and estimator.is_fusable and scorer.fuses:
        clip_range = estimator.clip_range if estimator.off_policy == "clip" else None
        read = token_values, estimator.topk, estimator.reads_jsd
        return scorer.loss(rollout, reference_states, weights, behaviour_logprobs, clip_range, *read), None
    if stats is None:
        read = token_values, estimator.topk, estimator.reads_jsd
        stats = scorer.stats(rollout, reference_states, *read)
    effective_share = estimator.effective_share(stats.logprobs, rollout.mask, behaviour_logprobs)
    settings = {"beta": beta, "behaviour_logprobs": behaviour_logprobs}
    return checked_loss(estimator, stats, rollout.mask, weights, **settings), effective_share


class Experience(NamedTuple):
    """A rollout and the quantities computed on the whole of it: detached, prompt-major.

    Args:
        rollout: B sequences with T completion positions.
        reference_states: The result of `Pair.states`, shape [B, T, D].
        behaviour_logprobs: Log-probabilities under the policy that sampled the completions, shape [B, T].
        rewards: Training reward of each completion, shape [B].
        weights: The estimator's weights of the loss, shape [B, T].
        token_values: The token values of the statistics that the weights are of, shape [V]; None without.
        metrics: Means over the rollouts of all processes, logged at each step on the rollout.
    """

    rollout: Rollout
    reference_states: Tensor
    behaviour_logprobs: Tensor
    rewards: Tensor
    weights: LossWeights
    token_values: Tensor | None
    metrics: dict[str, float]

    def part(self, index: int, count: int) -> "Experience":
        """Part number `index` of `count` parts of equal size, in the order of the rows."""
        size = len(self.rewards) // count
        rows = slice(index * size, (index + 1) * size)
        return self._replace(
            rollout=self.rollout.rows(rows),
            reference_states=self.reference_states[rows],
            behaviour_logprobs=self.behaviour_logprobs[rows],
            rewards=self.rewards[rows],
            weights=self.weights.map(lambda field: field[rows]),
        )

    def token_mean(self, values: Tensor) -> Tensor:
        """Mean of values [B, T] over completion tokens, each of which counts the same in the whole rollout.

        The sum over these sequences is divided by the number of tokens that as many have on average in the
        rollouts of all processes: the means of parts of equal size average to the mean over all tokens.
        """
        tokens = len(values) * self.metrics["length"]
        return torch.where(self.rollout.mask, values, 0).sum() / tokens

    def state(self) -> list[Any]:
        """The fields as tensors and plain tuples, so that a checkpoint refers to no class of this package."""
        states: Any = self.reference_states
        if isinstance(states, TeacherStates):
            states = states.teachers, *states.parts
        fields = self._replace(reference_states=states)
        return [tuple(field) if isinstance(field, tuple) else field for field in fields]

    @classmethod
    def of_processes(cls, states: list[Any], rank: int, processes: int, device: torch.device) -> "Experience":
        """That of one process, from the states of all, whose number must still be the same."""
        if len(states) != processes:
            problem = f"saved by {len(states)} processes, but trainer.devices gives {processes}"
            raise ConfigurationError(f"{problem}; resume with the same number", key="ckpt_path")
        return cls.from_state(states[rank], device)

    @classmethod
    def from_state(cls, state: list[Any], device: torch.device) -> "Experience":
        """The inverse of `state`, on a device."""
        rollout, reference_states, behaviour_logprobs, rewards, weights, token_values, metrics = state
        if isinstance(reference_states, tuple):
            reference_states = TeacherStates(reference_states[0], reference_states[1:])
        return cls(
            Rollout(*rollout).map(lambda field: field.to(device)),
            reference_states.to(device),
            behaviour_logprobs.to(device),
            rewards.to(device),
            LossWeights(*weights).map(lambda field: field.to(device)),
            None if token_values is None else token_values.to(device),
            metrics,
        )
