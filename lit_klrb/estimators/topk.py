"""`RaoBlackwell` with the k most likely tokens in place of the vocabulary, and seven rivals for study.

Notation: H are the k most likely tokens of one model, r = log p - log q (r_t at the sampled token), sum_H
sums over H, [..] is 1 if the condition holds and 0 otherwise. All have the credit of `RaoBlackwell`,
c_t = sum over s > t of K_s and l_t = K_t; they differ in K_t. Other software uses the rivals without credit
for the future, which is discount 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from lit_klrb.estimators.base import Explanation
from lit_klrb.estimators.composed import DiscountedEstimator
from lit_klrb.estimators.recipe import Recipe, Term
from lit_klrb.functional.logprobs import Support, TopK

_EXACT = "the gradient of KL(policy || reference), exactly"
_INSTEAD = "use RaoBlackwellTopK"


def _recipe(value: str) -> Recipe:
    return Recipe(value=value, score=(Term(value, "after"),), pathwise=value)


@dataclass(frozen=True, kw_only=True)
class TopKEstimator(DiscountedEstimator):
    """`RaoBlackwell` with an estimate from k tokens for the KL of each token.

    Args:
        k: Number of tokens in the head H, 1 to the size of the vocabulary.
        support: The model whose most likely tokens they are, policy or reference.
    """

    k: int = 64
    support: Support = "policy"

    @property
    @abstractmethod
    def estimate(self) -> str:
        """The formula of K_t."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.topk.check()

    @property
    @override
    def topk(self) -> TopK:
        return TopK(self.k, self.support)

    @property
    @override
    def formula(self) -> str:
        return f"{self.applied_recipe.formula}, K_t = {self.estimate}"

    @property
    @override
    def cost(self) -> str:
        return "both models' normalisers and log-probabilities of k tokens"


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellTopK(TopKEstimator):
    """Exact over k tokens, sampled outside them: unbiased in value and gradient, never negative.

    The KL is the sum over the vocabulary of p r - p + q, of which no summand is negative. The sum over H is
    exact; k3(r_t) of a sampled token outside H has the rest as its mean, and r_t grad log p(y_t) the
    gradient of the rest. k = V is `RaoBlackwell`, and so are statistics without a head.

    Reference:
        Summing the likely categories and sampling the others: Liu, Regier, Tripuraneni, Jordan, McAuliffe
        (2019), "Rao-Blackwellized stochastic gradients for discrete distributions", arXiv:1810.04777. The
        non-negative rest is added here.
    """

    recipe = _recipe("topk")
    estimate: ClassVar[str] = "sum_H (p r - p + q) + [y_t not in H] k3(r_t)"
    explanation = Explanation(
        optimises=_EXACT,
        caution="between MonteCarloRewardToGo (k small) and RaoBlackwell (k = V) in variance",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKTruncated(TopKEstimator):
    """The sum over the head alone."""

    recipe = _recipe("topk_truncated")
    estimate: ClassVar[str] = "sum_H p r"
    refusal = f"it omits the tokens outside H, so raising the probability of the head costs KL; {_INSTEAD}"
    explanation = Explanation(
        optimises="the KL of the head, which is neither a KL nor a bound and can be negative",
        used_by="verl (issue 5041), without credit for the future",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKRenormalised(TopKEstimator):
    """The KL of the two heads, each scaled to sum to 1."""

    recipe = _recipe("topk_renormalised")
    estimate: ClassVar[str] = "sum_H (p / P) (r - log(P / Q)), P = sum_H p, Q = sum_H q"
    refusal = f"it does not see the probability of the head, only its shape; {_INSTEAD}"
    explanation = Explanation(
        optimises="the KL given that the token is in H",
        used_by="tinker-cookbook (issue 677), without credit for the future",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKTailBucket(TopKEstimator):
    """The head, and all other tokens merged into one."""

    recipe = _recipe("topk_tail_bucket")
    estimate: ClassVar[str] = "sum_H p r + (1 - P) log((1 - P) / (1 - Q)), P = sum_H p, Q = sum_H q"
    refusal = f"it does not see differences among the tokens outside H; {_INSTEAD}"
    explanation = Explanation(
        optimises="the KL of distributions with k + 1 outcomes, a lower bound",
        used_by="verl (7855), miles (1322), slime (2033), without credit for the future",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKHeadOnly(TopKEstimator):
    """The head of `RaoBlackwellTopK` without its sampled tail."""

    recipe = _recipe("topk_head_only")
    estimate: ClassVar[str] = "sum_H (p r - p + q)"
    refusal = f"it omits the tokens outside H; {_INSTEAD}"
    explanation = Explanation(
        optimises="the head's part of the KL, a lower bound",
        used_by="MOPD (arXiv:2606.30406), without credit for the future",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKDetachedTail(TopKEstimator):
    """The head, and outside it the log ratio as a score."""

    recipe = _recipe("topk_detached_tail")
    estimate: ClassVar[str] = (
        "sum_H p r + [y_t not in H] r_t, with gradient r_t grad log p(y_t) of the latter"
    )
    refusal = f"its gradient has that of the head's probability, sum_H p, too much; {_INSTEAD}"
    explanation = Explanation(
        optimises="the KL plus the probability of H, which it lowers",
        used_by="the released code of EMA-PG (arXiv:2602.04417), without credit for the future",
        caution="its value is unbiased, and can be negative",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKWeightedTail(TopKEstimator):
    """The head, and outside it the log ratio with its own gradient and score."""

    recipe = _recipe("topk_weighted_tail")
    estimate: ClassVar[str] = (
        "sum_H p r + [y_t not in H] r_t, with gradient (1 + r_t) grad log p(y_t) of the latter"
    )
    explanation = Explanation(
        optimises=_EXACT,
        used_by="NeMo-RL (pull request 3608), without credit for the future",
        caution="its value can be negative; at a small KL many times the variance of MonteCarloRewardToGo",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKBaseline(TopKEstimator):
    """The log ratio of the sampled token, with the head's sum as the baseline of its score."""

    recipe = _recipe("topk_baseline")
    estimate: ClassVar[str] = "r_t, with gradient (r_t - sum_H p r) grad log p(y_t)"
    explanation = Explanation(
        optimises=_EXACT,
        used_by="vOPD (arXiv:2605.07865), without credit for the future",
        caution="hardly less noisy than MonteCarloRewardToGo",
    )
