"""Estimators put together from a value, whom it is credited to, a baseline and an off-policy correction."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.base import KLEstimator, LossWeights
from lit_klrb.functional.credit import (
    Credit,
    ImportanceWeights,
    assign_credit,
    check_group_size,
    importance_weights,
    leave_one_out_baseline,
)
from lit_klrb.functional.kl import kl_k1_per_token, kl_k2_per_token, kl_k3_increments, kl_k3_per_token
from lit_klrb.functional.logprobs import TokenStats
from lit_klrb.functional.surrogate import clipped_loss, weighted_loss

# "kl" is known before its token is drawn; the others depend on the token.
ValueName = Literal["k1", "k2", "k3", "k3_sequence", "kl"]


class Term(NamedTuple):
    """One summand of the score weight: a value, the tokens it is credited to, a sign."""

    value: ValueName
    credit: Credit
    sign: float = 1.0


class Recipe(NamedTuple):
    """What an estimator is made of.

    Args:
        value: The per-token KL value that is reported.
        score: The summands of the score weight c_t; none for a score weight of 0.
        pathwise: The differentiable value l_t, or None.
    """

    value: ValueName | None
    score: tuple[Term, ...] = ()
    pathwise: ValueName | None = None

    @property
    def needs_kl(self) -> bool:
        """Whether the KL over the vocabulary occurs."""
        return "kl" in (self.value, self.pathwise, *(term.value for term in self.score))


@dataclass(frozen=True, kw_only=True)
class ComposedEstimator(KLEstimator):
    """An estimator that is its `recipe`."""

    recipe: ClassVar[Recipe]

    @property
    @override
    def needs_kl(self) -> bool:
        return self.recipe.needs_kl

    @property
    def weighs_own_kl_anew(self) -> bool:
        """Whether the completion's own KL is credited in `loss`, at the current policy, not in `weights`."""
        return self.off_policy in ("prefix", "sequence")

    @override
    def value(self, stats: TokenStats, mask: Tensor) -> Tensor:
        return _per_token(stats.masked(mask), self.recipe.value).sum(-1)

    @override
    @torch.no_grad()
    def weights(
        self,
        stats: TokenStats,
        mask: Tensor,
        rewards: Tensor | None = None,
        *,
        beta: float = 1.0,
        group_size: int = 1,
    ) -> LossWeights:
        stats = stats.masked(mask)
        check_group_size(len(mask), group_size)
        own = self._credit(stats, importance_weights(torch.zeros_like(stats.logprobs), "none"))
        score = beta * (self._centred(own, group_size) - (own if self.weighs_own_kl_anew else 0))
        if rewards is not None:
            score = score - self._centred(rewards.to(score.dtype), group_size)[:, None]
        score = torch.where(mask, score, 0)
        kl_weight = 0.0 if self.recipe.pathwise is None else beta
        return LossWeights(score, kl_weight * mask.to(score.dtype))

    @override
    def loss(
        self,
        stats: TokenStats,
        mask: Tensor,
        weights: LossWeights,
        *,
        beta: float | Tensor = 1.0,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        stats = stats.masked(mask)
        score_weights, kl_weights = weights.map(lambda field: torch.where(mask, field, 0))
        log_ratio = log_ratio_to_behaviour(stats.logprobs, mask, behaviour_logprobs)
        scope = "none" if self.off_policy == "clip" else self.off_policy
        importance = importance_weights(log_ratio, scope)
        if self.weighs_own_kl_anew:
            score_weights = importance.sequence * score_weights + beta * self._credit(stats, importance)
        if self.off_policy == "clip":
            score = clipped_loss(log_ratio, score_weights, self.clip_range)
        else:
            score = weighted_loss(stats.logprobs, score_weights)
        if self.recipe.pathwise is None:
            return score
        pathwise = _per_token(stats, self.recipe.pathwise)
        return score + weighted_loss(pathwise, kl_weights * _importance_of(self.recipe.pathwise, importance))

    @property
    @override
    def is_fusable(self) -> bool:
        return not self.weighs_own_kl_anew and self.recipe.pathwise in (None, "kl")

    def _credit(self, stats: TokenStats, importance: ImportanceWeights) -> Tensor:
        """The score weight c_t of each completion by itself, without a baseline."""
        total = torch.zeros_like(stats.logprobs)
        for value, credit, sign in self.recipe.score:
            own = _importance_of(value, importance)
            total = total + sign * assign_credit(_per_token(stats, value), credit, importance.through, own)
        return total

    def _centred(self, values: Tensor, group_size: int) -> Tensor:
        return values if self.baseline is None else values - leave_one_out_baseline(values, group_size)


def _per_token(stats: TokenStats, value: ValueName | None) -> Tensor:
    logprobs, ref_logprobs = stats.logprobs, stats.ref_logprobs
    match value:
        case None:
            return torch.zeros_like(logprobs)
        case "k1":
            return kl_k1_per_token(logprobs, ref_logprobs)
        case "k2":
            return kl_k2_per_token(logprobs, ref_logprobs)
        case "k3":
            return kl_k3_per_token(logprobs, ref_logprobs)
        case "k3_sequence":
            return kl_k3_increments(logprobs - ref_logprobs)
        case "kl":
            if stats.kl is None:
                raise ConfigurationError("stats.kl is None; this estimator needs the KL of every token")
            return stats.kl


def _importance_of(value: ValueName, importance: ImportanceWeights) -> Tensor:
    return importance.before if value == "kl" else importance.through


def log_ratio_to_behaviour(logprobs: Tensor, mask: Tensor, behaviour_logprobs: Tensor | None) -> Tensor:
    """Current minus behaviour log-probability, 0 outside the mask; 0 with the same gradient on-policy."""
    behaviour = logprobs if behaviour_logprobs is None else torch.where(mask, behaviour_logprobs, 0)
    return logprobs - behaviour.detach()
