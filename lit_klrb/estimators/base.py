"""What every KL estimator offers, and what it says about itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.logprobs import TokenStats

Baseline = Literal["leave_one_out"]
OffPolicy = Literal["none", "prefix", "sequence", "clip"]


class Explanation(NamedTuple):
    """What an estimator computes and is good for, in words.

    Args:
        formula: Score weight c_t and pathwise term l_t of g = sum_t [c_t grad log p_t + grad l_t].
        optimises: What the gradient estimates in expectation, on-policy.
        cost: What it needs beyond the log-probabilities of the policy.
        used_by: Where else it is found.
        refusal: Why it is not trained with, and what to use instead; None for one that is right.
        caution: What to know before relying on it.
    """

    formula: str
    optimises: str
    cost: str
    used_by: str
    refusal: str | None = None
    caution: str | None = None


class LossWeights(NamedTuple):
    """Detached weights of a loss: the masked sum of score * log p(y_t) + kl * l_t, divided by B.

    Args:
        score: Weight of each token's log-probability, c_t, shape [B, T]; 0 outside the mask.
        kl: Weight of the estimator's differentiable term l_t, shape [B, T]; 0 outside the mask.
    """

    score: Tensor
    kl: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "LossWeights":
        """The same change made to each tensor: rows selected, a device, a type."""
        return LossWeights(*(change(field) for field in self))


@dataclass(frozen=True, kw_only=True)
class KLEstimator(ABC):
    """An estimate of KL(policy || reference), and of the gradient of what is trained with it.

    Shapes: B sequences, prompt-major (the `group_size` completions of a prompt are adjacent rows), T
    completion positions. `mask` [B, T] is true on completion tokens, EOS included; what `stats` hold outside
    it, NaN and infinities included, never matters.

    Args:
        baseline: "leave_one_out" subtracts from each score weight and reward the mean over the other
            completions of the prompt, position by position; null subtracts nothing.
        off_policy: What happens when the policy has moved since it generated. "none": nothing, biased after
            the first inner step, in the score part and in the KL. "prefix": every term under the importance
            weight of the tokens it depends on; "sequence": every term under that of the whole completion,
            with more variance; both unbiased for whatever the estimator estimates on-policy. "clip": PPO's
            clipped ratio in the score part, stale score weights, KL term unweighted; biased towards the
            policy that generated.
        clip_range: Half-width of the ratio's range under "clip".
    """

    explanation: ClassVar[Explanation]

    baseline: Baseline | None = "leave_one_out"
    off_policy: OffPolicy = "none"
    clip_range: float = 0.2

    def __post_init__(self) -> None:
        if self.baseline not in (*get_args(Baseline), None):
            raise ConfigurationError(f"baseline is {self.baseline!r}; 'leave_one_out' or None expected")
        if self.off_policy not in get_args(OffPolicy):
            raise ConfigurationError(
                f"off_policy is {self.off_policy!r}; one of {get_args(OffPolicy)} expected"
            )
        if not self.clip_range > 0:
            raise ConfigurationError(f"clip_range is {self.clip_range}; a number > 0 expected")

    @property
    @abstractmethod
    def needs_kl(self) -> bool:
        """Whether `stats.kl` may not be None."""

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
            Weights of a loss to be minimised: rewards enter `score` with a minus sign. Under "prefix" and
            "sequence" the completion's own KL is left out of `score`: `loss` adds it, under the importance
            weights of the current policy.

        Raises:
            ConfigurationError: If the batch is not made of groups, or a baseline is to be had of one.
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
            beta: As in `weights`; read where the completion's own KL is weighted anew.
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

    def check_trainable(self) -> None:
        """Refuse to train with an estimator whose gradient is not the KL's; its methods stay open to study.

        Raises:
            ConfigurationError: With the reason, for a known-wrong estimator without `allow_biased`.
        """
        if self.explanation.refusal is not None:
            raise ConfigurationError(
                f"{type(self).__name__} is not trained with unless allow_biased is true:"
                f" {self.explanation.refusal}"
            )
