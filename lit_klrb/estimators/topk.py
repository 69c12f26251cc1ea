"""Estimators from the k most likely tokens of one model, the head H.

Notation as in `lit_klrb.estimators.unbiased`; sum_H sums over H, [..] is 1 if the condition holds and 0
otherwise. Further estimates of other software are in `replication.topk_rivals`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from typing_extensions import override

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.composed import DiscountedEstimator
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import Recipe, Term
from lit_klrb.estimators.unbiased import FORWARD_KL, REVERSE_KL
from lit_klrb.functional.logprobs import Support, TopK


@dataclass(frozen=True, kw_only=True)
class TopKEstimator(DiscountedEstimator):
    """`RaoBlackwell` with an estimate from k tokens for the KL of each token.

    Args:
        k: Number of tokens in the head H, 1 to the size of the vocabulary.
        support: The model whose most likely tokens they are, policy or reference.
    """

    k: int = 64
    support: Support = "policy"

    estimate: ClassVar[str]  # the formula of K_t

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

    cost = "both models' normalisers and log-probabilities of k tokens"


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellTopK(TopKEstimator):
    """Exact over k tokens, sampled outside them: unbiased in value and gradient, never negative.

    The KL is the sum over the vocabulary of p r - p + q, of which no summand is negative. The sum over H is
    exact; k3(r_t) of a sampled token outside H has the rest as its mean, and r_t grad log p(y_t) the
    gradient of the rest. k = V is `RaoBlackwell`, and so are statistics without a head.

    The forward KL of a token has the same form with p and q exchanged. With w = q / p, the rest is the mean
    of w log w - w + 1 of a sampled token outside H, and its gradient that of (1 - w) grad log p(y_t).

    Args:
        divergence: reverse is KL(p || q), forward KL(q || p), which is summed over the tokens of the policy's
            completions as by `RaoBlackwell`.

    Reference:
        Summing the likely categories and sampling the others: Liu, Regier, Tripuraneni, Jordan, McAuliffe
        (2019), "Rao-Blackwellized stochastic gradients for discrete distributions", arXiv:1810.04777. The
        non-negative rest is added here.

    Example: a head of one token of three, p = (1/2, 1/4, 1/4). Their mean is the exact KL, 0.2231.

        >>> import torch
        >>> from lit_klrb.functional import token_stats
        >>> policy, reference = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.2, 0.4, 0.4]).log()
        >>> tokens, mask = torch.tensor([[0], [1], [2]]), torch.ones(3, 1, dtype=torch.bool)
        >>> estimator = RaoBlackwellTopK(k=1)
        >>> shape = (3, 1, 3)
        >>> stats = token_stats(policy.expand(shape), reference.expand(shape), tokens, topk=estimator.topk)
        >>> values = estimator.value(stats, mask)
        >>> values, values @ policy.exp()
        (tensor([0.1581, 0.2881, 0.2881]), tensor(0.2231))
    """

    divergence: Literal["reverse", "forward"] = "reverse"

    recipe = Recipe(value="topk", score=(Term("topk", "after"),), pathwise="topk")
    estimate: ClassVar[str] = "sum_H (p r - p + q) + [y_t not in H] k3(r_t)"
    explanation = Explanation(
        optimises=REVERSE_KL,
        caution="between MonteCarloRewardToGo (k small) and RaoBlackwell (k = V) in variance",
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence not in ("reverse", "forward"):
            problem = f"must be reverse or forward with a head, got {self.divergence!r}"
            raise ConfigurationError(problem, key="divergence")

    @property
    @override
    def applied_recipe(self) -> Recipe:
        if self.divergence == "reverse":
            return super().applied_recipe
        value = "forward_topk"
        return Recipe(value, (Term(value, "after", discount=self.discount),), value)

    @property
    @override
    def optimises(self) -> str | None:
        return super().optimises if self.divergence == "reverse" else FORWARD_KL

    @property
    @override
    def formula(self) -> str:
        if self.divergence == "reverse":
            return super().formula
        return f"{self.applied_recipe.formula}, K_t that of KL(q || p)"
