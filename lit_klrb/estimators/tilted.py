"""Expected token values in place of samples of the reward."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.estimators.base import Predicted
from lit_klrb.estimators.composed import RecipesEstimator, WeightedRecipes
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import Recipe, Term
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.estimators.unbiased import RaoBlackwell
from lit_klrb.functional.logprobs import TokenStats

# The gradient of E[sum_t E_t[a]] - E[sum_t a(y_t)], which is zero in expectation for every table a.
TOKEN_VALUE_DIFFERENCE = Recipe(
    value=None,
    score=(Term("expected_value", "after"), Term("value", "whole", -1.0)),
    pathwise="expected_value",
)


@final
@dataclass(frozen=True, kw_only=True)
class TiltedRaoBlackwell(RecipesEstimator):
    """`RaoBlackwell` for the KL and for the part of the reward that a table of token values predicts.

    For a table a with one value per token, which must not depend on the completions it is applied to,

        E[r] - beta KL(p || q) = E[r - sum_t a(y_t)] + E[sum_t E_t[a]] - beta KL(p || q),

    with E_t[a] = sum_v p(v | x, y_<t) a(v). Like the KL, the middle term has an exact gradient over the
    vocabulary; only the rest of the reward needs the sampled score. With R = r - sum_t a(y_t) and
    G_t = sum over s > t of (E_s[a] - beta KL_s):

        c_t = -[R - LOO(R)] - [G_t - LOO_t(G)],    l_t = beta KL_t - E_t[a].

    This is `RaoBlackwell` for the unnormalised reference q exp(a / beta). It is unbiased for every table
    fitted on other completions. Without token values in the statistics, and in `surrogate`, which has no
    reward, it equals `RaoBlackwell`.

    Without a baseline, the reward's part is, completion by completion, the trajectory-wise control variate
    with action values Q(y_<t, v) = sum over s < t of a(y_s) + a(v). Specific to this class are the values: a
    table without context instead of a critic, whose expectation over the vocabulary is taken together with
    the KL, and its use with leave-one-out and prefix weights.

    Reference:
        Cheng, Yan, Boots (2019), "Trajectory-wise control variates for variance reduction in policy gradient
        methods", arXiv:1908.03263; before it Pankov (2018), arXiv:1811.06225; as a doubly robust policy
        gradient Huang, Jiang (2019), arXiv:1910.09066.
    """

    token_values_predict: ClassVar[Predicted | None] = "rewards"
    needs_token_values = True
    recipe = RaoBlackwell.recipe
    explanation = Explanation(
        optimises="the gradient of KL(policy || reference)",
        caution=(
            "intended for the gradient of E[reward] - beta KL, with token values fitted on earlier rollouts;"
            " near the optimum its noise can exceed MonteCarlo's: RaoBlackwellControlVariate combines both"
            " with fitted coefficients"
        ),
    )

    formula = (
        "beta c_t = sum_s a(y_s) + sum_{s>t} (beta KL_s - E_s[a]), beta l_t = beta KL_t - E_t[a];"
        " without a: c_t = sum_{s>t} KL_s, l_t = KL_t"
    )

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
        recipes: list[tuple[Recipe, float | Tensor]] = [(RaoBlackwell.recipe, beta)]
        tilted = rewards is not None and stats.value is not None
        if tilted:
            recipes.append((TOKEN_VALUE_DIFFERENCE, -1.0))
        score = self.score(stats, mask, recipes, rewards, group_size)
        inside = mask.to(score.dtype)
        return LossWeights(score, beta * inside, -inside if tilted else None)

    @override
    def loss_recipes(self, weights: LossWeights, beta: float) -> WeightedRecipes:
        recipes: list[tuple[Recipe, float | Tensor]] = [(RaoBlackwell.recipe, weights.kl)]
        if weights.value is not None:
            recipes.append((TOKEN_VALUE_DIFFERENCE, weights.value))
        return recipes
