"""A rollout with the quantities computed from it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.estimators import LossWeights
from lit_klrb.models.generation import Rollout


class Experience(NamedTuple):
    """A rollout and the quantities computed on the whole of it: detached, prompt-major.

    Args:
        rollout: B sequences with T completion positions.
        reference_states: The result of `Scorer.reference_states`, shape [B, T, D].
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

    def rows(self, rows: slice) -> "Experience":
        """A slice of the sequences."""
        return self._replace(
            rollout=self.rollout.rows(rows),
            reference_states=self.reference_states[rows],
            behaviour_logprobs=self.behaviour_logprobs[rows],
            rewards=self.rewards[rows],
            weights=self.weights.map(lambda field: field[rows]),
        )

    def part(self, index: int, count: int) -> "Experience":
        """Part number `index` of `count` parts of equal size, in the order of the rows."""
        size = len(self.rewards) // count
        return self.rows(slice(index * size, (index + 1) * size))

    def state(self) -> list[Any]:
        """The fields as tensors and plain tuples, so that a checkpoint refers to no class of this package."""
        return [tuple(field) if isinstance(field, tuple) else field for field in self]

    @classmethod
    def from_state(cls, state: list[Any], device: torch.device) -> "Experience":
        """The inverse of `state`, on a device."""
        kinds = AttributeError, IndexError, RuntimeError, TypeError, ValueError
        with refusing("its rollout cannot be read", *kinds, key="ckpt_path"):
            rollout, reference_states, behaviour_logprobs, rewards, weights, token_values, metrics = state
            experience = cls(
                Rollout(*rollout).map(lambda field: field.to(device)),
                reference_states.to(device),
                behaviour_logprobs.to(device),
                rewards.to(device),
                LossWeights(*weights).map(lambda field: field.to(device)),
                None if token_values is None else token_values.to(device),
                {str(name): float(value) for name, value in metrics.items()},
            )
            *sequences, sampled = experience.rollout
            mask = experience.rollout.mask
            tokenwise = [*experience.weights, experience.behaviour_logprobs, sampled]
            sizes = {len(field) for field in (*sequences, experience.reference_states, experience.rewards)}
            is_valid = sizes == {len(mask)}
            is_valid &= all(field is None or field.shape == mask.shape for field in tokenwise)
            is_valid &= experience.weights.value is None if token_values is None else token_values.ndim == 1
            numbers = [experience.behaviour_logprobs[mask], experience.rewards]
            is_valid &= all(bool(field.isfinite().all()) for field in numbers)
        if not is_valid:
            raise ConfigurationError("its rollout has different shapes, or is not finite", key="ckpt_path")
        return experience
