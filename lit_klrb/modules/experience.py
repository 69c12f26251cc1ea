"""A rollout with everything that was computed on the whole of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators import LossWeights
from lit_klrb.models.generation import Rollout


class Experience(NamedTuple):
    """A rollout and what was computed on all of it, before any split: detached, prompt-major.

    Args:
        rollout: B sequences with T completion positions.
        reference_states: What the scorer keeps of the reference, [B, T, D].
        behaviour_logprobs: Log-probabilities the completions were drawn with, [B, T].
        rewards: What each completion is trained for, [B].
        weights: The estimator's weights of the loss, [B, T].
        metrics: Means over the rollouts of all processes, logged at each step on this one.
    """

    rollout: Rollout
    reference_states: Tensor
    behaviour_logprobs: Tensor
    rewards: Tensor
    weights: LossWeights
    metrics: dict[str, float]

    def rows(self, rows: slice) -> "Experience":
        """The same for some of the sequences."""
        tensors: dict[str, Any] = {k: v[rows] for k, v in self._asdict().items() if isinstance(v, Tensor)}
        weights = self.weights.map(lambda field: field[rows])
        return self._replace(rollout=self.rollout.rows(rows), weights=weights, **tensors)

    def part(self, index: int, count: int) -> "Experience":
        """Part number `index` of `count` equal ones, in the order of the rows."""
        size = len(self.rewards) // count
        return self.rows(slice(index * size, (index + 1) * size))

    def state(self) -> list[Any]:
        """The fields as tensors and plain tuples: reading a checkpoint then imports no class of ours."""
        return [tuple(field) if isinstance(field, tuple) else field for field in self]

    @classmethod
    def from_state(cls, state: list[Any], device: torch.device) -> "Experience":
        """The inverse of `state`, on a device."""
        rollout, reference_states, behaviour_logprobs, rewards, weights, metrics = state
        return cls(
            Rollout(*(tensor.to(device) for tensor in rollout)),
            reference_states.to(device),
            behaviour_logprobs.to(device),
            rewards.to(device),
            LossWeights(*weights).map(lambda field: field.to(device)),
            metrics,
        )
