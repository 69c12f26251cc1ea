"""Everything that an estimator remembers between rollouts."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_share
from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.checked import checked_weights
from lit_klrb.estimators.cross_fit import EarlierRollouts, FitSums
from lit_klrb.estimators.fitted import FittedEstimator
from lit_klrb.estimators.shapes import LossWeights, check_rollout
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.functional.checks import inside_mask
from lit_klrb.functional.logprobs import TokenStats, full_token_values

# Settings that can change over a run: their names, and what is biased before they reach the unbiased value.
_SETTINGS = {
    "discount": ("discount", "the gradient omits a token's effect on distant later KLs"),
    "forward_share": ("share of the forward KL", "a token's own term is KL(reference || policy)"),
}


class EstimatorMemory:
    """What an estimator remembers: token values, fitted coefficients, and settings that change.

    The order of a step is `token_values`, statistics, `weights`, loss, `observe`. No rollout is then weighted
    with anything that was fitted to it, which would bias the gradient. For an estimator that remembers
    nothing, `weights` is the estimator's own and `observe` does nothing.

    `observe` changes `token_values`. A loss on a rollout that has been observed needs those from before, as
    its weights do: keep them for as long as the rollout is used.

    Processes that observe the completions of all processes have the same memory.

    Args:
        estimator: The estimator.
        vocabulary_size: V; can be set later, as an attribute. Without it, token values end with the largest
            token id seen so far, and all others are 0.
        final_discount: Discount at progress 1, approached linearly from the estimator's own; None if it is
            constant.
        final_forward_share: Share of the forward KL at progress 1, in the same way.

    Attributes:
        estimator: The estimator with its settings at the current progress.
        finals: Those settings that change, by name, at progress 1.

    Raises:
        ConfigurationError: If a final setting is out of range, or the estimator has no such setting.

    Example:
        >>> from lit_klrb.estimators import RaoBlackwell
        >>> memory = EstimatorMemory(RaoBlackwell(discount=0.0), final_discount=1.0)
        >>> memory.progress = 0.25
        >>> memory.estimator.discount
        0.25
    """

    def __init__(
        self,
        estimator: KLEstimator,
        *,
        vocabulary_size: int | None = None,
        final_discount: float | None = None,
        final_forward_share: float | None = None,
    ) -> None:
        self.estimator, self.vocabulary_size = estimator, vocabulary_size
        finals = {"discount": final_discount, "forward_share": final_forward_share}
        self.finals = {name: value for name, value in finals.items() if value is not None}
        self._initial, self._last = estimator, _with_finals(estimator, self.finals)
        self._progress = 0.0
        predicted = estimator.token_values_predict
        self._values = None if predicted is None else TokenValues(predicted=predicted)
        self._earlier: EarlierRollouts | None = None
        if isinstance(estimator, FittedEstimator):
            self._earlier = EarlierRollouts(size=len(estimator.direction_names))
        # Those of the rollout that was weighted last, which `observe` adds
        self._sums: FitSums | None = None

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1. The caller sets it before each rollout."""
        return self._progress

    @progress.setter
    def progress(self, progress: float) -> None:
        check_share(progress=progress)
        self._progress = progress
        if self.finals:
            settings = {
                name: getattr(self._initial, name) + progress * (last - getattr(self._initial, name))
                for name, last in self.finals.items()
            }
            self.estimator = replace(self._initial, **settings)

    @property
    def remembers(self) -> bool:
        """Whether a rollout can change the weights of later ones."""
        return self._values is not None or self._earlier is not None

    def check_trainable(self, optimizer_steps: int = 1) -> None:
        """`KLEstimator.check_trainable` at progress 1: the bias before it is `passing_bias`."""
        self._last.check_trainable(optimizer_steps)

    @property
    def passing_bias(self) -> str | None:
        """What is biased before progress 1, as text; None if nothing is, or something still is then."""
        if self._initial.bias is None or self._last.bias is not None:
            return None
        lines = []
        for name, last in self.finals.items():
            setting, biased = _SETTINGS[name]
            first = getattr(self._initial, name)
            if first != last:
                change = f"{'increases' if first < last else 'decreases'} from {first:g} to {last:g}"
                lines.append(f"the {setting} {change} over the run: at first {biased}")
        return f"{'; '.join(lines)}, a bias that vanishes towards the last step"

    def statement(self, optimizer_steps: int = 1) -> str | None:
        """What the gradient estimates, and whether with bias, as text; None if the estimator does not say.

        Args:
            optimizer_steps: Optimizer steps per rollout.

        Example:
            >>> from lit_klrb.estimators import K2Loss, MonteCarlo
            >>> EstimatorMemory(MonteCarlo(off_policy="prefix")).statement(2)
            'the gradient of KL(policy || reference); unbiased'
            >>> EstimatorMemory(MonteCarlo(off_policy="clip")).statement(2)
            'the gradient of KL(policy || reference); biased after the first of 2 steps on a rollout
            (off_policy clip)'
        """
        estimator, optimises = self.estimator, self.estimator.optimises
        if optimises is None:
            return None
        changes = [f"the {name} changes to {last:g} over the run" for name, last in self.finals.items()]
        biases = []
        if self.passing_bias is not None:
            biases, changes = [self.passing_bias], []
        elif estimator.bias is not None:
            biases = ["biased" if estimator.refusal else f"biased: {estimator.bias}"]
        if self.is_biased_later(optimizer_steps):
            which = f"the first of {optimizer_steps} steps on a rollout"
            biases.append(f"biased after {which} ({estimator.later_bias})")
        return "; ".join([optimises, *(biases or ["unbiased"]), *changes])

    def is_biased_later(self, optimizer_steps: int) -> bool:
        """Whether the gradient is biased from the second optimizer step on a rollout on."""
        return optimizer_steps > 1 and self.estimator.later_bias is not None

    @property
    def token_values(self) -> Tensor | None:
        """Values for the statistics of the next rollout, fitted to earlier ones, shape [V]; None for none."""
        return None if self._values is None else self._values.table

    @property
    def metrics(self) -> dict[str, float]:
        """Share of the rewards, or of the KL to come, that token values explained; empty without them."""
        if self._values is None:
            return {}
        name = "reward_explained" if self._values.predicted == "rewards" else "kl_explained"
        return {name: self._values.explained}

    def start_from(self, prior: Tensor) -> None:
        """Begin with given token values, such as those that a warm start fitted to rewards.

        Args:
            prior: Values independent of the completions that are weighted later, shape [V].

        Raises:
            ConfigurationError: If the estimator has no token values of rewards.
        """
        if self._values is None or self._values.predicted != "rewards":
            name = type(self.estimator).__name__
            raise ConfigurationError(f"{name} has no token values of rewards", key="prior")
        self._values.start_from(prior)

    @torch.no_grad()
    def weights(
        self,
        stats: TokenStats,
        mask: Tensor,
        rewards: Tensor | None,
        *,
        beta: float,
        group_size: int,
        tokens: Tensor,
    ) -> LossWeights:
        """The estimator's weights of a rollout, with what was fitted to earlier ones.

        Args:
            stats: Statistics of the rollout, with `token_values` if there are any.
            mask: See `KLEstimator.weights`.
            rewards: See there.
            beta: See there.
            group_size: See there.
            tokens: Token ids of the completions, shape [B, T].

        Raises:
            ConfigurationError: If the statistics have other token values, besides the reasons given there.
        """
        check_rollout(stats, mask, rewards=rewards, beta=beta, group_size=group_size, tokens=tokens)
        self._check_values(stats, mask, tokens)
        rollout, settings = (stats, mask, rewards), {"beta": beta, "group_size": group_size}
        if self._earlier is None or not isinstance(self.estimator, FittedEstimator):
            return checked_weights(self.estimator, *rollout, **settings)
        weights, self._sums = self.estimator.fitted_weights(
            self._earlier.sums, *rollout, beta=beta, group_size=group_size
        )
        return weights

    @torch.no_grad()
    def observe(
        self, tokens: Tensor, mask: Tensor, rewards: Tensor | None, stats: TokenStats, *, group_size: int
    ) -> None:
        """Remember a rollout, after its weights were computed.

        Args:
            tokens: Token ids of the completions, shape [B, T].
            mask: True on completion tokens, shape [B, T].
            rewards: Reward of each completion, shape [B]; None for the KL alone, which teaches nothing to
                token values that predict rewards.
            stats: The statistics given to `weights`.
            group_size: Completions per prompt.

        Raises:
            ConfigurationError: If token values cannot be fitted to such a rollout.
        """
        check_rollout(stats, mask, rewards=rewards, group_size=group_size, tokens=tokens)
        if self._earlier is not None and self._sums is not None:
            self._earlier.observe(self._sums)
            self._sums = None
        values = self._values
        if values is None or (values.predicted == "rewards" and rewards is None):
            return
        inside_mask(tokens, mask)
        if group_size < 2:
            why = "token values predict differences between the completions of a prompt"
            raise ConfigurationError(f"must be at least 2, as {why}", key="group_size")
        if values.predicted == "kl_to_come":
            if stats.kl is None:
                raise ConfigurationError("stats.kl is None; token values predict the KL of every token")
            discount = getattr(self.estimator, "discount", 1.0)
            values.observe_to_come(tokens, mask, stats.kl, group_size, discount)
        elif rewards is not None:
            values.observe(tokens, mask, rewards, group_size)
        values.fit(self.vocabulary_size)

    def _check_values(self, stats: TokenStats, mask: Tensor, tokens: Tensor) -> None:
        table = self.token_values
        if table is None:
            return
        if stats.value is None:
            raise ConfigurationError(
                "must be computed with memory.token_values, got none: the weights would be those of an "
                "estimator without token values",
                key="stats",
            )
        inside_mask(tokens, mask)
        tokens, computed = tokens[mask], stats.value[mask]
        size = max(len(table), int(tokens.max()) + 1 if len(tokens) else 0)
        values = full_token_values(table, size, like=computed)
        assert values is not None
        # Statistics in lower precision than the table are the same
        if not torch.allclose(values[tokens], computed, rtol=1e-2, equal_nan=True):
            raise ConfigurationError("must be computed with memory.token_values, got others", key="stats")

    def state_dict(self) -> dict[str, Any]:
        """The complete state, as plain tensors and numbers."""
        parts = {"token_values": self._values, "earlier_rollouts": self._earlier}
        state = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return {"progress": self._progress, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            ConfigurationError: If it is not the state of such an estimator.
        """
        if state.keys() != self.state_dict().keys():
            raise ConfigurationError(
                f"holds no memory of {type(self.estimator).__name__} where one is expected", key="ckpt_path"
            )
        self.progress = state["progress"]
        if self._values is not None:
            self._values.load_state_dict(state["token_values"])
        if self._earlier is not None:
            self._earlier.load_state_dict(state["earlier_rollouts"])


def _with_finals(estimator: KLEstimator, finals: dict[str, Any]) -> KLEstimator:
    """The estimator with its last settings, checked."""
    for name, value in finals.items():
        if not hasattr(estimator, name):
            problem = f"{type(estimator).__name__} has no {name}; leave it out"
            raise ConfigurationError(problem, key=f"final_{name}")
        check_share(**{f"final_{name}": value})
    return replace(estimator, **finals)
