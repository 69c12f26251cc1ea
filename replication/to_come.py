"""Token values in place of samples of the KL to come."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from typing_extensions import override

from lit_klrb.estimators import RaoBlackwell
from lit_klrb.estimators.base import Predicted
from lit_klrb.estimators.composed import Discounted, WeightedRecipes
from lit_klrb.estimators.fitted import FittedEstimator
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import Recipe, Term
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.functional.logprobs import TokenStats

# Zero in expectation for every table a. No token is credited with the values of earlier ones, as in
# `TOKEN_VALUE_DIFFERENCE`, which predicts a reward of the whole completion: they do not predict later KLs.
TO_COME_DIFFERENCE = Recipe(
    value=None,
    score=(Term("expected_value", "after"), Term("value", "from_here", -1.0)),
    pathwise="expected_value",
)


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellTokenValues(Discounted, FittedEstimator):
    """`RaoBlackwell` with token values that predict the KL to come, for distillation.

    Without a reward, the noise of `RaoBlackwell` is that of its credit, the sampled KL after each token. For
    a table a with one value per token (in nats), which must not depend on the completions it is applied to,
    and E_t[a] = sum_v p(v | x, y_<t) a(v):

        c_t = sum_{s>t} KL_s + g [sum_{s>t} E_s[a] - sum_{s>=t} a(y_s)],    l_t = KL_t + g E_t[a].

    The score of a(y_t) has the exact gradient of E_t[a] as its expectation, and a(y_s) - E_s[a] at s > t is
    noise of mean zero that is correlated with the KL to come, so the gradient is unbiased for every a and g.
    In training a is fitted to earlier rollouts (`EstimatorMemory`), and g on other prompts
    (`FittedEstimator`): it is near 0, which is `RaoBlackwell`, while the table predicts little. Rewards enter
    as in `RaoBlackwell`.
    """

    token_values_predict: ClassVar[Predicted | None] = "kl_to_come"
    needs_token_values = True
    explanation = Explanation(
        optimises="the gradient of KL(policy || reference)",
        caution=(
            "intended for distillation, with token values fitted on earlier rollouts; with a reward use"
            " TiltedRaoBlackwell"
        ),
    )

    formula = (
        "c_t = sum_{s>t} KL_s + g (sum_{s>t} E_s[a] - sum_{s>=t} a(y_s)), l_t = KL_t + g E_t[a], with g"
        " fitted on other prompts; without a: c_t = sum_{s>t} KL_s, l_t = KL_t"
    )

    @override
    def loss_recipes(self, weights: LossWeights, beta: float) -> WeightedRecipes:
        kl, difference = self._recipes
        recipes: list[tuple[Recipe, float | Tensor]] = [(kl, weights.kl)]
        if weights.value is not None:
            recipes.append((difference, weights.value))
        return recipes

    @override
    def pathwise_weights(
        self, coefficients: dict[str, Tensor], mask: Tensor, beta: float
    ) -> tuple[Tensor, Tensor]:
        return beta * mask, beta * coefficients.get("token_values", 0.0) * mask

    @override
    def terms(
        self, stats: TokenStats, mask: Tensor, rewards: Tensor | None, beta: float, group_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        kl, difference = self._recipes
        origin = self.score(stats, mask, [(kl, beta)], rewards, group_size)
        if stats.value is None:
            return origin, {}
        direction = self.score(stats, mask, [(difference, beta)], None, group_size)
        return origin, {"token_values": direction}

    @property
    def _recipes(self) -> tuple[Recipe, Recipe]:
        return RaoBlackwell.recipe.discounted(self.discount), TO_COME_DIFFERENCE.discounted(self.discount)
