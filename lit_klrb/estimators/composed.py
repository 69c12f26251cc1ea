"""Estimators composed of a recipe, a baseline and an off-policy correction."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.errors import ConfigurationError, check_share
from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.recipe import Recipe, per_token
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.functional.baselines import check_group_size
from lit_klrb.functional.credit import (
    ImportanceWeights,
    RatioCap,
    assign_credit,
    effective_share,
    importance_weights,
    weighted,
)
from lit_klrb.functional.logprobs import TokenStats
from lit_klrb.functional.surrogate import clipped_loss, weighted_loss

# Recipes with the weight of each.
WeightedRecipes = Sequence[tuple[Recipe, float | Tensor]]


@dataclass(frozen=True, kw_only=True)
class RecipesEstimator(KLEstimator):
    """An estimator whose loss is a weighted sum of recipes, under its baseline and off-policy correction."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """What its value and its cost are of; a subclass sets it as a class attribute."""

    @property
    def applied_recipe(self) -> Recipe:
        """The recipe with the estimator's settings."""
        return self.recipe

    @property
    @override
    def cost(self) -> str:
        return self.recipe.cost

    @override
    def value(self, stats: TokenStats, mask: Tensor) -> Tensor:
        stats, value = stats.masked(mask), self.applied_recipe.value
        if value is None:
            return stats.logprobs.new_zeros(len(mask))
        return per_token(value).of(stats).sum(-1)

    @abstractmethod
    def loss_recipes(self, weights: LossWeights, beta: float) -> WeightedRecipes:
        """Recipes with their weights in the loss, numbers or shape [B, T]."""

    def score(
        self,
        stats: TokenStats,
        mask: Tensor,
        recipes: WeightedRecipes,
        rewards: Tensor | None,
        group_size: int,
    ) -> Tensor:
        """Score weights of weighted recipes minus the rewards, each minus its baseline, shape [B, T].

        Args:
            stats: Statistics of the rollout under the policy that sampled it.
            mask: True on completion tokens, shape [B, T].
            recipes: Recipes with their weights, numbers or shape [B, 1]; equal within a group.
            rewards: Reward of each completion, shape [B]; None for none.
            group_size: Completions per prompt.
        """
        stats = stats.masked(mask)
        check_group_size(len(mask), group_size)
        score = torch.zeros_like(stats.logprobs)
        for recipe, weight in recipes:
            credit = on_policy_credit(recipe, stats)
            centred = self.centred(credit, group_size)
            # The loss adds a completion's own credit with importance weights: only the baseline is left here
            # `weighted`, as a weight of 0 must remove an infinite KL
            score = score + weighted(weight, centred - credit if self.credits_own_kl_in_loss else centred)
        if rewards is not None:
            score = score - self.centred(rewards.to(score.dtype), group_size)[:, None]
        return torch.where(mask, score, 0)

    @override
    def loss(
        self,
        stats: TokenStats,
        mask: Tensor,
        weights: LossWeights,
        *,
        beta: float = 1.0,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        stats = stats.masked(mask)
        score_weights = torch.where(mask, weights.score, 0)
        recipes = [
            (recipe, torch.where(mask, torch.as_tensor(weight, dtype=score_weights.dtype), 0))
            for recipe, weight in self.loss_recipes(weights, beta)
        ]
        log_ratio = log_ratio_to_behaviour(stats.logprobs, mask, behaviour_logprobs)
        importance = self._importance(log_ratio)
        if self.credits_own_kl_in_loss:
            # Rewards and baselines depend on whole completions, hence the weight of the sequence
            score_weights = importance.sequence * score_weights
            for recipe, weight in recipes:
                credited = _credit(recipe, stats, importance, self.off_policy == "token")
                score_weights = score_weights + weighted(weight, credited)
        if self.off_policy == "clip":
            loss = clipped_loss(log_ratio, score_weights, self.clip_range)
        else:
            loss = weighted_loss(stats.logprobs, score_weights)
        for recipe, weight in recipes:
            if recipe.pathwise is not None:
                for values, own in per_token(recipe.pathwise).parts(stats, importance):
                    loss = loss + weighted_loss(values, weight * own)
        return loss

    def _importance(self, log_ratio: Tensor) -> ImportanceWeights:
        cap = None if self.ratio_cap is None else RatioCap(self.ratio_cap, self.beyond_cap)
        return importance_weights(log_ratio, "none" if self.off_policy == "clip" else self.off_policy, cap)

    @override
    def effective_share(self, logprobs: Tensor, mask: Tensor, behaviour_logprobs: Tensor) -> Tensor | None:
        if not self.credits_own_kl_in_loss:
            return None
        logprobs = torch.where(mask, logprobs.detach(), 0)
        weights = self._importance(log_ratio_to_behaviour(logprobs, mask, behaviour_logprobs)).through
        if self.off_policy == "sequence":  # one weight for each completion
            weights, mask = weights[:, :1], mask[:, :1]
        return effective_share(weights, mask)

    @property
    @override
    def is_fusable(self) -> bool:
        return not self.credits_own_kl_in_loss


@dataclass(frozen=True, kw_only=True)
class ComposedEstimator(RecipesEstimator):
    """An estimator defined by its `recipe`; subclass it to define another.

    Example:
        >>> from lit_klrb.estimators import ComposedEstimator, Recipe, Term
        >>> class OwnToken(ComposedEstimator):
        ...     recipe = Recipe(value="k1", score=(Term("k1", "own"),))
        >>> OwnToken().formula
        'c_t = r_t, l_t = 0'
    """

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.recipe, Recipe):
            raise ConfigurationError(f"{type(self).__name__}.recipe must be a Recipe, got {self.recipe!r}")

    @property
    @override
    def formula(self) -> str:
        return self.applied_recipe.formula

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
        score = self.score(stats, mask, [(self.applied_recipe, beta)], rewards, group_size)
        kl_weight = 0.0 if self.recipe.pathwise is None else beta
        return LossWeights(score, kl_weight * mask.to(score.dtype))

    @override
    def loss_recipes(self, weights: LossWeights, beta: float) -> WeightedRecipes:
        if beta == 0:  # the derivative of what is infinite would be 0 * inf = NaN
            return []
        return [(self.applied_recipe, beta if self.recipe.pathwise is None else weights.kl)]

    @property
    @override
    def is_fusable(self) -> bool:
        return super().is_fusable and self.applied_recipe.pathwise in (None, "kl", "topk")


@dataclass(frozen=True, kw_only=True)
class Discounted(KLEstimator):
    """An estimator with credit for later values, which may be discounted.

    Args:
        discount: Factor of the credit for a later value per token of distance, 0 to 1. Below 1 the gradient
            is biased and less noisy; 0 leaves the token's own value, the gradient of a token-level loss.
    """

    discount: float = 1.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(discount=self.discount)

    @property
    @override
    def bias(self) -> str | None:
        if self.refusal is not None or self.discount == 1:
            return self.refusal
        return (
            f"with discount {self.discount:g} a token's effect on later KLs counts "
            f"{self.discount:g}^distance as much; use discount 1, or final_discount 1, which it increases to"
        )


@dataclass(frozen=True, kw_only=True)
class DiscountedEstimator(Discounted, ComposedEstimator):
    """An estimator defined by a recipe with credit for later values, which may be discounted."""

    @property
    @override
    def applied_recipe(self) -> Recipe:
        return self.recipe.discounted(self.discount)


def on_policy_credit(recipe: Recipe, stats: TokenStats) -> Tensor:
    """The score weight c_t of each completion, without baseline or off-policy correction, shape [B, T]."""
    return _credit(recipe, stats, importance_weights(torch.zeros_like(stats.logprobs), "none"))


def log_ratio_to_behaviour(logprobs: Tensor, mask: Tensor, behaviour_logprobs: Tensor | None) -> Tensor:
    """Current minus behaviour log-probability, 0 outside the mask.

    On-policy it is 0 everywhere, with the gradient of the log-probabilities.
    """
    behaviour = logprobs if behaviour_logprobs is None else torch.where(mask, behaviour_logprobs, 0)
    return logprobs - behaviour.detach()


def _credit(
    recipe: Recipe, stats: TokenStats, importance: ImportanceWeights, by_token: bool = False
) -> Tensor:
    """The score weight c_t of each completion, shape [B, T], with each value under its importance weight.

    `by_token` multiplies everything credited to a token, later values included, by that token's ratio alone.
    """
    if by_token:
        return importance.through * on_policy_credit(recipe, stats)
    total = torch.zeros_like(stats.logprobs)
    for term in recipe.score:
        for values, own in per_token(term.value).parts(stats, importance):
            credit = assign_credit(values, term.credit, importance.through, own, term.discount)
            total = total + term.factor * credit
    return total
