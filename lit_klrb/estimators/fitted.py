"""Estimators with coefficients that are fitted on other prompts and on earlier rollouts."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.estimators.composed import RecipesEstimator
from lit_klrb.estimators.cross_fit import DIRECTIONS, FitSums, cross_fitted_coefficients
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.estimators.unbiased import RaoBlackwell
from lit_klrb.functional.logprobs import TokenStats


@dataclass(frozen=True, kw_only=True)
class FittedEstimator(RecipesEstimator):
    """Score weights at g = 0, plus directions of mean zero times coefficients g.

    The gradient is unbiased for every g that does not depend on the completions it is applied to, so the g of
    a prompt is fitted on the other prompts of the rollout and, in training, on those of earlier rollouts
    (`EstimatorMemory`); see `cross_fitted_coefficients`. Coefficients are weights of differentiable terms in
    `LossWeights` and therefore independent of any split of the rollout.

    A subclass with directions of its own overrides `direction_names`.
    """

    recipe = RaoBlackwell.recipe

    @property
    def direction_names(self) -> tuple[str, ...]:
        """The names of all directions that `terms` can have, in a fixed order."""
        return DIRECTIONS

    @abstractmethod
    def terms(
        self, stats: TokenStats, mask: Tensor, rewards: Tensor | None, beta: float, group_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Score weights at g = 0, and the increment per unit of each direction, shape [B, T] each."""

    @abstractmethod
    def pathwise_weights(
        self, coefficients: dict[str, Tensor], mask: Tensor, beta: float
    ) -> tuple[Tensor, Tensor]:
        """`LossWeights.kl` and, if there are token values, `LossWeights.value`, shape [B, T] each.

        Args:
            coefficients: Those of the directions of `terms`, shape [B, 1] each.
            mask: 1 on completion tokens and 0 elsewhere, shape [B, T].
            beta: Weight of the KL.
        """

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
        return self.fitted_weights(None, stats, mask, rewards, beta=beta, group_size=group_size)[0]

    @torch.no_grad()
    def fitted_weights(
        self,
        earlier: FitSums | None,
        stats: TokenStats,
        mask: Tensor,
        rewards: Tensor | None = None,
        *,
        beta: float = 1.0,
        group_size: int = 1,
    ) -> tuple[LossWeights, FitSums]:
        """`weights` with coefficients fitted on earlier rollouts too, and what later fits need of this one.

        Returns:
            The weights, and the sums over the groups of this rollout.
        """
        rollout = stats.masked(mask), mask, rewards, beta, group_size
        # Fit to the complete on-policy weights, even if `loss` adds a part of them
        on_policy = replace(self, off_policy="none").terms(*rollout)
        coefficients = cross_fitted_coefficients(*on_policy, group_size, earlier, self.direction_names)
        score, directions = self.terms(*rollout)
        for name, direction in directions.items():
            score = score + coefficients[name] * direction
        kl_weight, value_weight = self.pathwise_weights(coefficients, mask.to(score.dtype), beta)
        weights = LossWeights(score, kl_weight, None if stats.value is None else value_weight)
        return weights, FitSums.of(*on_policy, group_size, self.direction_names).total()
