"""`RaoBlackwell` with the k most likely tokens in place of the vocabulary.

Notation: H are the k most likely tokens of one model, r = log p - log q (r_t at the sampled token), sum_H
sums over H, [..] is 1 if the condition holds and 0 otherwise. The credit is that of `RaoBlackwell`,
c_t = sum over s > t of K_s and l_t = K_t. Estimates K_t of other software are in `replication.topk_rivals`.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from lit_klrb.estimators.base import Explanation
from lit_klrb.estimators.composed import DiscountedEstimator
from lit_klrb.estimators.recipe import Recipe, Term
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

    recipe = Recipe(value="topk", score=(Term("topk", "after"),), pathwise="topk")
    estimate: ClassVar[str] = "sum_H (p r - p + q) + [y_t not in H] k3(r_t)"
    explanation = Explanation(
        optimises="the gradient of KL(policy || reference), exactly",
        caution="between MonteCarloRewardToGo (k small) and RaoBlackwell (k = V) in variance",
    )
