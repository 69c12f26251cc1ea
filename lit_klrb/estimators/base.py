"""What every KL estimator offers, and what it says about itself."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.baselines import leave_one_out_baseline
from lit_klrb.functional.logprobs import TokenStats

Baseline = Literal["leave_one_out"]
OffPolicy = Literal["none", "token", "prefix", "sequence", "clip"]


class Explanation(NamedTuple):
    """What `python -m lit_klrb explain` says of an estimator beyond what it derives and measures.

    Args:
        optimises: What the gradient estimates in expectation, on-policy.
        used_by: Where else it is found.
        caution: What to know before relying on it.
    """

    optimises: str
    used_by: str
    caution: str | None = None


class LossWeights(NamedTuple):
    """Detached weights of a loss: the masked sum of score log p(y_t) + kl l_t + value E_t, divided by B.

    Args:
        score: Weight of each token's log-probability, c_t, shape [B, T]; 0 outside the mask.
        kl: Weight of the estimator's differentiable KL term l_t, shape [B, T]; 0 outside the mask.
        value: Weight of the expected token value E_t, shape [B, T]; None without token values.
    """

    score: Tensor
    kl: Tensor
    value: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "LossWeights":
        """The same change made to each field that is there: rows selected, a device, a type."""
        value = None if self.value is None else change(self.value)
        return LossWeights(change(self.score), change(self.kl), value)


@dataclass(frozen=True, kw_only=True)
class KLEstimator(ABC):
    """Owns the whole weight of each token's score: credit of the KL, RLOO's baseline, off-policy correction.

    `weights` turns a rollout and its rewards into the weights of a loss; `loss` is that loss, whose gradient
    estimates minus that of E[reward] - beta KL(policy || reference). A subclass implements `value`,
    `weights` and `loss`; `ComposedEstimator` implements them from a recipe.

    Shapes: B sequences, prompt-major (the `group_size` completions of a prompt are adjacent rows), T
    completion positions. `mask` [B, T] is true on completion tokens, EOS included; what `stats` hold outside
    it, NaN and infinities included, never matters.

    Args:
        baseline: "leave_one_out" subtracts from each score weight and reward the mean over the other
            completions of the prompt, position by position; null subtracts nothing.
        off_policy: The correction once the policy has moved away from the one that generated. "none": no
            correction, biased after the first optimizer step of a rollout. "token": every token's term is
            multiplied by that token's own ratio, p(y_t) / p_old(y_t); biased, as the ratios of earlier tokens
            are left out. "prefix": every term is multiplied by the ratio of the tokens it depends on;
            "sequence": by that of the whole completion, with more variance; both unbiased for whatever the
            estimator estimates on-policy. "clip": PPO's clipped ratio in the score part, with the score
            weights of the rollout and the KL term unweighted; biased towards the policy that generated.
        clip_range: Half-width of the ratio's range under "clip".
        allow_biased: Train even though the gradient is known to be biased: with an estimator of another
            objective, or with several optimizer steps per rollout and no correction.
    """

    explanation: ClassVar[Explanation | None] = None
    refusal: ClassVar[str | None] = None  # why it is not trained with, and what to use instead
    reads_token_values: ClassVar[bool] = False  # whether statistics with token values change its weights

    baseline: Baseline | None = "leave_one_out"
    off_policy: OffPolicy = "none"
    clip_range: float = 0.2
    allow_biased: bool = False

    def __post_init__(self) -> None:
        if self.baseline not in (*get_args(Baseline), None):
            raise ConfigurationError(
                f"must be 'leave_one_out' or None, got {self.baseline!r}", key="baseline"
            )
        if self.off_policy not in get_args(OffPolicy):
            raise ConfigurationError(
                f"must be one of {', '.join(get_args(OffPolicy))}, got {self.off_policy!r}", key="off_policy"
            )
        if not 0 < self.clip_range < math.inf:
            raise ConfigurationError(f"must be positive and finite, got {self.clip_range}", key="clip_range")

    @property
    def formula(self) -> str | None:
        """Score weight c_t and pathwise term l_t of g = sum_t [c_t grad log p(y_t) + grad l_t], in words."""
        return None

    @property
    def cost(self) -> str | None:
        """What it needs beyond the log-probabilities of the policy, in words."""
        return None

    @abstractmethod
    def value(self, stats: TokenStats, mask: Tensor) -> Tensor:
        """KL estimate of each sequence in nats, shape [B]."""

    @abstractmethod
    def weights(
        self,
        stats: TokenStats,
        mask: Tensor,
        rewards: Tensor | None = None,
        *,
        beta: float = 1.0,
        group_size: int = 1,
    ) -> LossWeights:
        """The weights of the loss: everything that couples sequences, computed once on the whole rollout.

        Args:
            stats: Statistics of the rollout under the policy that generated it.
            mask: Completion tokens, shape [B, T].
            rewards: Reward of each completion, shape [B]; None for the KL alone.
            beta: Weight of the KL, in units of reward per nat.
            group_size: Completions per prompt.

        Returns:
            Weights of a loss to be minimised: rewards enter `score` with a minus sign. Under "token",
            "prefix" and "sequence" the completion's own KL is left out of `score`: `loss` adds it, under the
            importance weights of the current policy.

        Raises:
            ConfigurationError: If the batch does not consist of groups, or the groups of a leave-one-out
                baseline have one completion.
        """

    @abstractmethod
    def loss(
        self,
        stats: TokenStats,
        mask: Tensor,
        weights: LossWeights,
        *,
        beta: float = 1.0,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        """The scalar to minimise on any part of the rollout, averaged over the sequences given.

        Args:
            stats: Statistics under the current policy, differentiable.
            mask: Completion tokens, shape [B, T].
            weights: The rows of `weights(...)` for these sequences.
            beta: As in `weights`; read where the completion's own KL is credited in the loss.
            behaviour_logprobs: Log-probabilities under the policy that generated, shape [B, T]; None where
                that is the current policy. Constants: no gradient flows here.

        Returns:
            Scalar. Gradients of micro-batches, weighted by their sizes, add up to that of the whole batch.
        """

    @property
    def is_fusable(self) -> bool:
        """Whether `tiled_policy_loss` forms the same loss from the weights.

        It does where l_t is the exact KL of the token and `weights` hold all there is to the score part: the
        weight of the log-probability or, under "clip", of the clipped ratio.
        """
        return False

    @property
    def credits_own_kl_in_loss(self) -> bool:
        """Whether a completion's own KL is credited in `loss`, under the current policy, not in `weights`."""
        return self.off_policy in ("token", "prefix", "sequence")

    def centred(self, values: Tensor, group_size: int) -> Tensor:
        """Values [B] or [B, T] minus their baseline."""
        return values if self.baseline is None else values - leave_one_out_baseline(values, group_size)

    def surrogate(
        self,
        stats: TokenStats,
        mask: Tensor,
        *,
        group_size: int = 1,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        """Scalar whose gradient estimates that of KL(policy || reference), averaged over the sequences."""
        weights = self.weights(stats, mask, group_size=group_size)
        return self.loss(stats, mask, weights, behaviour_logprobs=behaviour_logprobs)

    def objective(
        self,
        stats: TokenStats,
        mask: Tensor,
        rewards: Tensor,
        *,
        beta: float,
        group_size: int,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        """Scalar to minimise: its gradient estimates that of -(E[reward] - beta KL)."""
        weights = self.weights(stats, mask, rewards, beta=beta, group_size=group_size)
        return self.loss(stats, mask, weights, beta=beta, behaviour_logprobs=behaviour_logprobs)

    def check_trainable(self, optimizer_steps: int = 1) -> None:
        """Refuse to train where the gradient is known to be biased; the methods stay open to study.

        Args:
            optimizer_steps: Optimizer steps that are made with each rollout.

        Raises:
            ConfigurationError: With the reason, unless `allow_biased`.
        """
        if self.allow_biased:
            return
        name = type(self).__name__
        if self.refusal is not None:
            raise ConfigurationError(
                f"{name} is not trained with unless allow_biased is true: {self.refusal}"
            )
        if self.off_policy == "none" and optimizer_steps > 1:
            raise ConfigurationError(
                f"must not be none with {optimizer_steps} optimizer steps per rollout unless allow_biased is "
                f"true, as {name}'s gradient is biased from the second on: use prefix or sequence (unbiased) "
                "or clip (PPO's, biased but bounded)",
                key="off_policy",
            )
