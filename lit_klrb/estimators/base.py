"""The interface of KL estimators."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.estimators.labels import Explanation, as_yaml, label_of
from lit_klrb.estimators.shapes import LossWeights, with_checks
from lit_klrb.functional.baselines import leave_one_out_baseline
from lit_klrb.functional.credit import BeyondCap
from lit_klrb.functional.logprobs import TokenStats, TopK
from lit_klrb.functional.surrogate import ClipRange, check_clip_range

Baseline = Literal["leave_one_out"]
OffPolicy = Literal["none", "token", "prefix", "sequence", "clip"]
Predicted = Literal["rewards", "kl_to_come"]


@dataclass(frozen=True, kw_only=True)
class KLEstimator(ABC):
    """Computes the complete weight of each token's score: KL credit, RLOO's baseline, off-policy correction.

    `weights` turns a rollout and its rewards into the weights of a loss; the gradient of `loss` estimates
    that of -(E[reward] - beta KL(policy || reference)). A subclass implements `value`, `weights` and `loss`;
    `ComposedEstimator` implements them from a recipe.

    Shapes: B sequences, prompt-major (the `group_size` completions of a prompt are adjacent rows), T
    completion positions. `mask` [B, T] is true on completion tokens, EOS included; the values of `stats`
    outside it have no influence, NaN and infinities included. `check_rollout` checks the arguments of all
    methods, of subclasses too.

    Args:
        baseline: "leave_one_out" subtracts from each score weight and reward the mean over the other
            completions of the prompt, position by position; null subtracts nothing.
        off_policy: The correction for a policy that differs from the one that sampled the completions.
            "none": no correction; biased after the first optimizer step of a rollout. "token": every token's
            term is multiplied by that token's ratio, p(y_t) / p_old(y_t); biased, as the ratios of earlier
            tokens are omitted. "prefix": every term is multiplied by the product of the ratios of the tokens
            it depends on; "sequence": by that of the whole completion, with more variance; both leave the
            expectation of the on-policy estimator unchanged. "clip": PPO's clipped ratio in the score part,
            with the rollout's score weights and an uncorrected KL term; biased towards the sampling policy.
        clip_range: Width of the ratio's range around 1 under "clip", or two: below and above 1.
        ratio_cap: Bound of the ratios under "token", "prefix" and "sequence", of a token or the product of
            several; biased where ratios exceed it, with bounded variance. null for none.
        beyond_cap: What a larger ratio counts: "truncate" the bound, "mask" nothing.
        allow_biased: Allow training although the gradient is known to be biased: with an estimator of
            another objective, or with several optimizer steps per rollout and no correction.
    """

    explanation: ClassVar[Explanation | None] = None
    refusal: ClassVar[str | None] = None  # why training with it is refused, and what to use instead
    # What the token values that it reads from the statistics predict; None if it reads none
    token_values_predict: ClassVar[Predicted | None] = None
    # Whether it is another estimator without them, and therefore without earlier rollouts
    needs_token_values: ClassVar[bool] = False

    baseline: Baseline | None = "leave_one_out"
    off_policy: OffPolicy = "none"
    clip_range: ClipRange = 0.2
    ratio_cap: float | None = None
    beyond_cap: BeyondCap = "truncate"
    allow_biased: bool = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name in {"value", "weights", "loss"} & {*vars(cls)}:
            setattr(cls, name, with_checks(name, getattr(cls, name)))

    def __post_init__(self) -> None:
        choices = {"baseline": (*get_args(Baseline), None), "off_policy": get_args(OffPolicy)}
        choices["beyond_cap"] = get_args(BeyondCap)
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                names = ", ".join(map(as_yaml, allowed))
                raise ConfigurationError(f"must be one of {names}, got {value!r}", key=name)
        check_clip_range(self.clip_range)
        check_positive(ratio_cap=self.ratio_cap)
        if self.ratio_cap is not None and not self.credits_own_kl_in_loss:
            problem = f"needs off_policy token, prefix or sequence, got {self.off_policy}"
            raise ConfigurationError(f"{self.ratio_cap:g} {problem}", key="ratio_cap")

    @property
    def label(self) -> str:
        """Its class, with the settings that change what it computes and differ from the class's defaults.

        Example:
            >>> from lit_klrb.estimators import MonteCarlo, RaoBlackwellControlVariate
            >>> MonteCarlo(allow_biased=True).label, MonteCarlo(off_policy="prefix", baseline=None).label
            ('MonteCarlo', 'MonteCarlo(baseline=null, off_policy=prefix)')
            >>> RaoBlackwellControlVariate(directions=("token_values",)).label
            'RaoBlackwellControlVariate(directions=[token_values])'
        """
        return label_of(self)

    @property
    def bias(self) -> str | None:
        """Why its gradient is known to be biased on-policy, by definition or by its settings, or None."""
        return self.refusal

    @property
    def later_bias(self) -> str | None:
        """Which setting biases its gradient after the first optimizer step on a rollout, or None."""
        if self.ratio_cap is not None:
            return f"off_policy {self.off_policy}, ratio_cap {self.ratio_cap:g}"
        return None if self.off_policy in ("prefix", "sequence") else f"off_policy {self.off_policy}"

    @property
    def optimises(self) -> str | None:
        """What its gradient estimates in expectation, on-policy, as text; None if it does not say."""
        return self.explanation and self.explanation.optimises

    @property
    def topk(self) -> TopK | None:
        """The head of the vocabulary whose sums it reads from the statistics; None for none."""
        return None

    @property
    def reads_jsd(self) -> float | None:
        """The weight of the Jensen-Shannon divergence that takes the KL's place, see `jsd_sum`, or None."""
        return None

    @property
    def reads_prefix_rewards(self) -> bool:
        """Whether it uses `TokenStats.reward_to_come`."""
        return False

    @property
    def formula(self) -> str | None:
        """Score weight c_t and pathwise term l_t of g = sum_t [c_t grad log p(y_t) + grad l_t], as text."""
        return None

    @property
    def cost(self) -> str | None:
        """What it needs beyond the policy's log-probabilities, as text."""
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
        """The weights of the loss, computed once on the whole rollout, as they couple sequences.

        Args:
            stats: Statistics of the rollout under the policy that sampled it.
            mask: True on completion tokens, shape [B, T].
            rewards: Reward of each completion, shape [B]; None for the KL alone.
            beta: Weight of the KL, in units of reward per nat.
            group_size: Completions per prompt.

        Returns:
            Weights of a loss to be minimised: rewards enter `score` with a minus sign. Under "token",
            "prefix" and "sequence", `score` excludes the completion's own KL: `loss` adds it with the
            importance weights of the current policy.

        Raises:
            ConfigurationError: If B is not a multiple of `group_size`, or `group_size` is 1 with a
                leave-one-out baseline.
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
        """The loss to minimise on any part of the rollout, averaged over its sequences.

        Args:
            stats: Statistics under the current policy, differentiable.
            mask: True on completion tokens, shape [B, T].
            weights: The rows of `weights(...)` for these sequences.
            beta: As in `weights`; used where `loss` credits the completion's own KL.
            behaviour_logprobs: Log-probabilities under the policy that sampled the completions, shape [B, T],
                detached; None if that is the current policy.

        Returns:
            A scalar. The gradients of micro-batches, weighted by their sizes, sum to that of the whole batch.
        """

    @property
    def is_fusable(self) -> bool:
        """Whether `tiled_policy_loss` computes the same loss from the weights.

        True if l_t is the exact KL of the token, or `kl_topk`, and `weights` determine the score part: the
        weight of the log-probability or, under "clip", of the clipped ratio.
        """
        return False

    @property
    def credits_own_kl_in_loss(self) -> bool:
        """Whether a completion's own KL is credited by `loss`, under the current policy, not by `weights`."""
        return self.off_policy in ("token", "prefix", "sequence")

    def effective_share(self, logprobs: Tensor, mask: Tensor, behaviour_logprobs: Tensor) -> Tensor | None:
        """`functional.credit.effective_share` of the importance weights of `loss`; None without any.

        Args:
            logprobs: Log-probabilities under the current policy, shape [B, T].
            mask: True on completion tokens, shape [B, T].
            behaviour_logprobs: Those under the policy that sampled the completions, shape [B, T].
        """
        return None

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
        """A scalar whose gradient estimates that of KL(policy || reference), averaged over the sequences.

        Warns if the gradient is known to be biased, unless `allow_biased`.

        Raises:
            ConfigurationError: If the statistics have no gradient, except under `torch.no_grad`.
        """
        weights = self.weights(stats, mask, group_size=group_size)
        loss = self.loss(stats, mask, weights, behaviour_logprobs=behaviour_logprobs)
        return self._checked(loss)

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
        """The loss to minimise: its gradient estimates that of -(E[reward] - beta KL).

        Warns and raises as `surrogate` does. With beta = 0, even an infinite KL has no influence.
        """
        weights = self.weights(stats, mask, rewards, beta=beta, group_size=group_size)
        loss = self.loss(stats, mask, weights, beta=beta, behaviour_logprobs=behaviour_logprobs)
        return self._checked(loss)

    def _checked(self, loss: Tensor) -> Tensor:
        """The loss of a loop of one's own, which must have a gradient; a biased one is warned of."""
        if torch.is_grad_enabled() and not loss.requires_grad:
            problem = "have no gradient in the policy: they are detached, or were computed under no_grad"
            raise ConfigurationError(problem, key="stats")
        if self.bias is not None and not self.allow_biased:
            remedy = "allow_biased=True says that you want it"
            # Python shows it once for each line that calls `objective` or `surrogate`
            warnings.warn(f"{self.label} has a biased gradient: {self.bias}; {remedy}", stacklevel=3)
        return loss

    def check_trainable(self, optimizer_steps: int = 1) -> None:
        """Raise if the gradient is known to be biased; only training calls this.

        Args:
            optimizer_steps: Optimizer steps per rollout.

        Raises:
            ConfigurationError: With the reason, unless `allow_biased`.
        """
        if self.allow_biased:
            return
        name = type(self).__name__
        if self.bias is not None:
            problem = "is refused for training unless allow_biased is true"
            raise ConfigurationError(f"{name} {problem}: {self.bias}")
        if self.off_policy == "none" and optimizer_steps > 1:
            steps = f"{optimizer_steps} optimizer steps per rollout unless allow_biased is true"
            problem = f"must not be none with {steps}, as {name}'s gradient is biased from the second on"
            remedy = "use prefix or sequence (unbiased) or clip (PPO's, biased but bounded)"
            raise ConfigurationError(f"{problem}: {remedy}", key="off_policy")
