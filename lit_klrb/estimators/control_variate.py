"""The combination of `MonteCarlo` and `RaoBlackwell` that the other groups of the rollout ask for."""

from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.estimators.base import Explanation, KLEstimator, LossWeights
from lit_klrb.estimators.composed import weighted_recipes_loss
from lit_klrb.estimators.unbiased import MonteCarlo, RaoBlackwell
from lit_klrb.functional.logprobs import TokenStats


class _Arms(NamedTuple):
    monte_carlo: MonteCarlo
    rao_blackwell: RaoBlackwell


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellControlVariate(KLEstimator):
    """`MonteCarlo` plus c times (`RaoBlackwell` - `MonteCarlo`), a control variate: its mean is zero.

    Every c that does not depend on the completions it is applied to leaves the gradient unbiased; c = 0 is
    `MonteCarlo`, c = beta is `RaoBlackwell`. Near the optimum of E[reward] - beta KL the log ratio is almost
    an affine function of the reward, and MonteCarlo's noise cancels the reward's. On the way there it is
    still correlated with it, and a negative c makes it a baseline for the reward. Each group's c is fitted
    on the other groups of the batch: see `cross_fitted_coefficients`.

    c is the weight of the differentiable KL in `LossWeights`, and so survives any split of the rollout.
    """

    explanation = Explanation(
        optimises="the gradient of KL(policy || reference), exactly",
        used_by="nowhere else",
        caution=(
            "made for the whole gradient of E[reward] - beta KL; c is 0, which is MonteCarlo, with fewer than"
            " three groups in a batch, and stays near 0 where the other groups do not agree on it"
        ),
    )

    @property
    @override
    def formula(self) -> str:
        return "c_t = (1 - c) sum_s r_s + c sum_{s>t} KL_s, l_t = c KL_t, c fitted on other groups"

    @property
    @override
    def cost(self) -> str | None:
        return self._arms.rao_blackwell.cost

    @override
    def value(self, stats: TokenStats, mask: Tensor) -> Tensor:
        return self._arms.rao_blackwell.value(stats, mask)

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
        def at_zero_and_slope(arms: _Arms) -> tuple[Tensor, Tensor]:
            monte_carlo, rao_blackwell = (
                arm.weights(stats, mask, group_size=group_size).score for arm in arms
            )
            at_zero = arms.monte_carlo.weights(stats, mask, rewards, beta=beta, group_size=group_size)
            return at_zero.score, rao_blackwell - monte_carlo

        on_policy = replace(self, off_policy="none")._arms
        coefficients = cross_fitted_coefficients(*at_zero_and_slope(on_policy), group_size)[:, None]
        at_zero, slope = at_zero_and_slope(self._arms)
        return LossWeights(at_zero + coefficients * slope, coefficients * mask)

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
        recipes = [(MonteCarlo.recipe, beta - weights.kl), (RaoBlackwell.recipe, weights.kl)]
        return weighted_recipes_loss(self, stats, mask, weights.score, recipes, behaviour_logprobs)

    @property
    @override
    def is_fusable(self) -> bool:
        return not self.credits_own_kl_in_loss

    @property
    def _arms(self) -> _Arms:
        options = {name: getattr(self, name) for name in ("baseline", "off_policy", "clip_range")}
        return _Arms(MonteCarlo(**options), RaoBlackwell(**options))


def cross_fitted_coefficients(at_zero: Tensor, slope: Tensor, group_size: int) -> Tensor:
    """For each group the c, from the other groups, that makes the score weights `at_zero + c slope` small.

    The mean square of the score weights stands for the variance of the gradient: the noise of both
    estimators is in it. The least-squares c of the other groups is multiplied by the share of it (0 to 1)
    that does best when each of them is predicted from the rest, less that share's standard error: what a
    few groups claim and the others do not confirm is left out.

    Args:
        at_zero: Score weights at c = 0, shape [B, T].
        slope: Their derivative in c, shape [B, T].
        group_size: Completions per prompt.

    Returns:
        c of each sequence, shape [B]; 0 with fewer than three groups.

    Reference: the share is the coefficient of Breiman (1996), "Stacked regressions".
    """
    product, square = (
        (factor * slope).double().sum(-1).view(-1, group_size).sum(-1) for factor in (at_zero, slope)
    )
    # Sums over others are added up anew: taken off the whole, a huge group would leave rounding only.
    others = 1 - torch.eye(len(square), dtype=torch.float64, device=square.device)

    def least_squares(product: Tensor, square: Tensor) -> Tensor:
        return torch.where(square > 0, -product / square, 0)

    fitted = least_squares(others @ product, others @ square)
    without_pair = least_squares((others * product) @ others, (others * square) @ others)
    gain = others * -without_pair * product
    cost = others * without_pair**2 * square
    share = (gain.sum(1) / cost.sum(1)).clamp(0, 1)
    error = (gain - share[:, None] * cost).square().sum(1).sqrt() / cost.sum(1)
    coefficients = fitted * (share - error).clamp(min=0).nan_to_num()
    return coefficients.to(slope.dtype).repeat_interleave(group_size)
