"""`MonteCarlo` plus control variates with coefficients fitted on other prompts and earlier rollouts."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.base import Predicted
from lit_klrb.estimators.composed import WeightedRecipes
from lit_klrb.estimators.cross_fit import DIRECTIONS
from lit_klrb.estimators.fitted import FittedEstimator
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import Recipe
from lit_klrb.estimators.shapes import LossWeights
from lit_klrb.estimators.tilted import TOKEN_VALUE_DIFFERENCE
from lit_klrb.estimators.unbiased import MonteCarlo, RaoBlackwell
from lit_klrb.extensions import DIRECTIONS as ADDED, extensions, load
from lit_klrb.functional.baselines import leave_one_out_baseline
from lit_klrb.functional.credit import weighted
from lit_klrb.functional.logprobs import TokenStats


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellControlVariate(FittedEstimator):
    """`MonteCarlo` plus a combination of gradients with mean zero, fitted on other prompts.

    With r_t the log ratio, R = r - beta sum_t r_t and ctr(x) = x - LOO(x) the score weights are

        c_t = -ctr(R) + g_kl beta ctr(sum_{s>t} KL_s - sum_s r_s) + g_a ctr(sum_s a(y_s) - sum_{s>t} E_s[a])
              - g_loo LOO(R) - g_1 + g_r ctr(r(x, y_<t)),    l_t = g_kl beta KL_t - g_a E_t[a].

    The first term is `MonteCarlo`. The directions added to it are

    - kl: from `MonteCarlo` to `RaoBlackwell`. Near the optimum of E[reward] - beta KL the log ratio is almost
      an affine function of the reward, and MonteCarlo's noise cancels that of the reward; elsewhere not;
    - token_values: replaces sampled token values by their expectations (`TiltedRaoBlackwell`);
    - leave_one_out: shrinks the leave-one-out mean, the noisiest part with few completions;
    - constant: a baseline common to all prompts;
    - prefix_rewards: the reward of the completion before the token, as a baseline of that token; with g_r = 1
      a token is credited with what the reward changes from it on.

    g = 0 gives `MonteCarlo`, g_kl = 1 gives `RaoBlackwell`, and g_a = 1 in addition `TiltedRaoBlackwell`. See
    `FittedEstimator` for the fit.

    Reference:
        Combinations of control variates with fitted coefficients: Geffner, Domke (2018), "Using large
        ensembles of control variates for variational inference", arXiv:1810.12482.

    Args:
        directions: The directions to use. token_values and prefix_rewards are ignored without token values or
            `reward_to_come` in the statistics, and leave_one_out without a baseline. Others can be added by
            the entry points `lit_klrb.directions` of installed packages: functions
            `(stats, mask, rewards, *, beta, group_size)` with the increment of the score weights, [B, T],
            which has mean zero if it is known before its token is drawn.
    """

    token_values_predict: ClassVar[Predicted | None] = "rewards"
    explanation = Explanation(
        optimises="the gradient of KL(policy || reference)",
        caution=(
            "intended for the gradient of E[reward] - beta KL. Without earlier rollouts, coefficients are 0,"
            " which is MonteCarlo, with fewer than three prompts per batch"
        ),
    )

    directions: tuple[str, ...] = DIRECTIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*DIRECTIONS, *extensions(ADDED))
        chosen = {*self.directions}
        if not chosen or not chosen <= {*known} or len(chosen) < len(self.directions):
            raise ConfigurationError(
                f"must be different ones of {', '.join(known)}, got {self.directions!r}", key="directions"
            )

    @property
    @override
    def direction_names(self) -> tuple[str, ...]:
        return (*DIRECTIONS, *(name for name in self.directions if name not in DIRECTIONS))

    @property
    @override
    def reads_prefix_rewards(self) -> bool:
        return "prefix_rewards" in self.directions

    formula = (
        "c_t = (1 - a) sum_s r_s + a sum_{s>t} KL_s, l_t = a KL_t, and multiples of baselines and of"
        " token values, all fitted on other prompts"
    )

    @override
    def loss_recipes(self, weights: LossWeights, beta: float) -> WeightedRecipes:
        recipes = [(MonteCarlo.recipe, beta - weights.kl), (RaoBlackwell.recipe, weights.kl)]
        return recipes if weights.value is None else [*recipes, (TOKEN_VALUE_DIFFERENCE, weights.value)]

    @override
    def pathwise_weights(
        self, coefficients: dict[str, Tensor], mask: Tensor, beta: float
    ) -> tuple[Tensor, Tensor]:
        return beta * coefficients.get("kl", 0.0) * mask, -coefficients.get("token_values", 0.0) * mask

    @override
    def terms(
        self, stats: TokenStats, mask: Tensor, rewards: Tensor | None, beta: float, group_size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def score(*recipes: tuple[Recipe, float], rewards: Tensor | None = None) -> Tensor:
            return self.score(stats, mask, recipes, rewards, group_size)

        directions: dict[str, Tensor] = {}
        if "kl" in self.directions:
            directions["kl"] = score((RaoBlackwell.recipe, beta), (MonteCarlo.recipe, -beta))
        if "token_values" in self.directions and stats.value is not None:
            directions["token_values"] = score((TOKEN_VALUE_DIFFERENCE, -1.0))
        if "leave_one_out" in self.directions and self.baseline is not None:
            penalty = weighted(beta, MonteCarlo().value(stats, mask))
            others = leave_one_out_baseline(penalty if rewards is None else penalty - rewards, group_size)
            directions["leave_one_out"] = others[:, None] * mask
        if "constant" in self.directions:
            directions["constant"] = -mask.to(stats.logprobs.dtype)
        if self.reads_prefix_rewards and stats.reward_to_come is not None and rewards is not None:
            before = rewards[:, None] - stats.reward_to_come
            directions["prefix_rewards"] = torch.where(mask, self.centred(before, group_size), 0)
        for name in self.direction_names[len(DIRECTIONS) :]:
            own = load(extensions(ADDED)[name])(stats, mask, rewards, beta=beta, group_size=group_size)
            directions[name] = torch.where(mask, own, 0)
        return score((MonteCarlo.recipe, beta), rewards=rewards), directions
