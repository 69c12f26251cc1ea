"""Estimators whose gradient is that of KL(policy || reference) in expectation.

Notation: r_t = log p(y_t) - log q(y_t) (the log ratio), KL_t = KL(p || q) over the vocabulary at t. Those
that read k tokens of the vocabulary are in `lit_klrb.estimators.topk`.
"""

from dataclasses import dataclass, replace
from typing import Literal, final

from typing_extensions import override

from lit_klrb.errors import ConfigurationError, check_share
from lit_klrb.estimators.composed import ComposedEstimator, DiscountedEstimator, WeightedRecipes
from lit_klrb.estimators.labels import Explanation
from lit_klrb.estimators.recipe import PER_TOKEN, Recipe, Term
from lit_klrb.estimators.shapes import LossWeights

Divergence = Literal["reverse", "forward", "jsd"]
# The field of the statistics with each
_DIVERGENCES: dict[Divergence, str] = {"reverse": "kl", "forward": "forward_kl", "jsd": "jsd"}

REVERSE_KL = "the gradient of KL(policy || reference)"
_SAMPLED = "summed over the tokens of the policy's completions"
FORWARD_KL = f"the gradient of KL(reference || policy) {_SAMPLED}"


@final
@dataclass(frozen=True, kw_only=True)
class MonteCarlo(ComposedEstimator):
    """The log ratio of the whole sequence as a reward: c_t = sum over all s of r_s.

    The usual KL penalty of RLHF, reward - beta sum_t r_t, with the same credit for every token.

    Reference: Ahmadian et al. (2024), "Back to basics: revisiting REINFORCE style optimization".
    """

    recipe = Recipe(value="k1", score=(Term("k1", "whole"),))
    explanation = Explanation(
        optimises=REVERSE_KL,
        used_by="a KL in the reward: TRL's RLOO, an option in verl, SkyRL and ms-swift",
        caution=(
            "noisy far from the optimum of E[reward] - beta KL; near it, its noise cancels that of the reward"
            " and the whole gradient can have far less variance than RaoBlackwell's"
        ),
    )


@final
@dataclass(frozen=True, kw_only=True)
class MonteCarloRewardToGo(DiscountedEstimator):
    """The sum of log ratios from each token to the end: c_t = sum over s >= t of r_s.

    PPO's per-token penalty -beta r_t, with undiscounted returns.
    """

    recipe = Recipe(value="k1", score=(Term("k1", "from_here"),))
    explanation = Explanation(
        optimises=REVERSE_KL,
        used_by="a KL in the reward: OpenRLHF's default, an option in slime; Tinker's kl_discount_factor 1",
        caution="right as MonteCarlo, and noisy: each token is credited with sampled log ratios",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwell(DiscountedEstimator):
    """The exact per-token KL in place of the log ratio: c_t = sum over s > t of KL_s, l_t = KL_t.

    Another divergence D of a token's distributions can take the place of the KL, in the value, in the token's
    own term and in the credit for later tokens. The gradient is then that of E[sum_t D_t] over completions of
    the policy. The sum is a divergence of the sequences for the reverse KL only.

    Args:
        divergence: reverse is KL(p || q); forward is KL(q || p); jsd is the Jensen-Shannon divergence, which
            is between them.
        jsd_weight: Weight w of the policy in the mixture w p + (1 - w) q of jsd, 0 to 1. The divergence is
            JSD_w / (w (1 - w)), which is reverse at 0 and forward at 1; GKD's and TRL's beta is 1 - w.
        forward_share: Share s of KL(q || p), the forward KL, in the token's own term, 0 to 1: l_t is
            (1 - s) KL_t + s KL(q || p)_t. Above 0 the gradient is biased. That of KL_t is small
            where p gives almost no probability to what q prefers; that of the forward KL, p - q for the
            logits, is not.

    Reference: Amini, Vieira, Cotterell (2025), "Better estimation of the KL divergence between language
    models", arXiv:2504.10637, Theorem 4. The forward KL on the student's own samples: Agarwal et al. (2024),
    "On-policy distillation of language models", arXiv:2306.13649.

    Example: completions of one token, p = (1/2, 1/2) and q = (0.9, 0.1). The surrogate's gradient for the
        logits is that of the KL, p (log p/q - KL).

        >>> import torch
        >>> from lit_klrb.functional import token_stats
        >>> logits, reference = torch.zeros(2, requires_grad=True), torch.tensor([0.9, 0.1]).log()
        >>> tokens, mask = torch.tensor([[0], [1]]), torch.ones(2, 1, dtype=torch.bool)
        >>> stats = token_stats(logits.expand(2, 1, 2), reference.expand(2, 1, 2), tokens)
        >>> RaoBlackwell().value(stats.detach(), mask)
        tensor([0.5108, 0.5108])
        >>> RaoBlackwell(baseline=None).surrogate(stats, mask).backward()
        >>> logits.grad
        tensor([-0.5493,  0.5493])
    """

    divergence: Divergence = "reverse"
    jsd_weight: float = 0.5
    forward_share: float = 0.0

    recipe = Recipe(value="kl", score=(Term("kl", "after"),), pathwise="kl")
    explanation = Explanation(
        optimises=REVERSE_KL,
        used_by="nikolageorgiev2000/apart (commit 2000773, 2026-07-25), divided by the tokens of the batch",
        caution=(
            "given the prefix, no step has more variance than MonteCarlo's, but the sum over a sequence can."
            " Example with two tokens: p(a) = p(b) = 1/2, q(a) = 0.3, q(b) = 0.7; after a both models agree,"
            " after b p is certain of a token to which q gives 3/7. Every sequence has log ratio 0.511:"
            " MonteCarlo's variance is 0, RaoBlackwell's is not"
        ),
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(forward_share=self.forward_share, jsd_weight=self.jsd_weight)
        if self.divergence not in _DIVERGENCES:
            names = ", ".join(_DIVERGENCES)
            raise ConfigurationError(f"must be one of {names}, got {self.divergence!r}", key="divergence")
        for name, only in (("jsd_weight", "jsd"), ("forward_share", "reverse")):
            value = getattr(self, name)
            if self.divergence != only and value != type(self).__dataclass_fields__[name].default:
                problem = f"{value:g} needs divergence {only}, got {self.divergence}"
                raise ConfigurationError(problem, key=name)

    @property
    @override
    def applied_recipe(self) -> Recipe:
        return self.recipe.of_divergence(_DIVERGENCES[self.divergence]).discounted(self.discount)

    @property
    @override
    def reads_jsd(self) -> float | None:
        return {"reverse": None, "forward": 1.0, "jsd": self.jsd_weight}[self.divergence]

    @property
    @override
    def optimises(self) -> str | None:
        if self.divergence == "reverse":
            return super().optimises
        if self.divergence == "forward":
            return FORWARD_KL
        return f"the gradient of the Jensen-Shannon divergence ({self.jsd_weight:g}) {_SAMPLED}"

    @property
    def _own(self) -> list[tuple[str, float]]:
        """The differentiated values with their shares."""
        if self.divergence != "reverse":
            return [(_DIVERGENCES[self.divergence], 1.0)]
        shares = {"kl": 1 - self.forward_share, "forward_kl": self.forward_share}
        return [(value, share) for value, share in shares.items() if share]

    @property
    @override
    def bias(self) -> str | None:
        if not self.forward_share:
            return super().bias
        forward = (
            f"with forward_share {self.forward_share:g} a token's own term is in part KL(reference || "
            "policy), the other direction; use forward_share 0, or decrease it by final_forward_share 0"
        )
        return "; ".join(filter(None, (super().bias, forward)))

    @property
    @override
    def formula(self) -> str:
        if not self.forward_share:
            return super().formula
        own = " + ".join(
            ("" if share == 1 else f"{share:g} ") + PER_TOKEN[value].symbol.format("t")
            for value, share in self._own
        )
        credit, pathwise, _ = super().formula.partition("l_t = ")
        return f"{credit}{pathwise}{own}"

    @override
    def loss_recipes(self, weights: LossWeights, beta: float) -> WeightedRecipes:
        credit = replace(self.applied_recipe, pathwise=None)
        own = [(Recipe(value=None, pathwise=value), share * weights.kl) for value, share in self._own]
        return [(credit, weights.kl), *own]

    @property
    @override
    def is_fusable(self) -> bool:
        return not self.credits_own_kl_in_loss and not self.forward_share


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellSequence(ComposedEstimator):
    """The exact per-token KL, summed over the whole sequence: c_t = sum over all s of KL_s, l_t = KL_t."""

    recipe = Recipe(value="kl", score=(Term("kl", "whole"),), pathwise="kl")
    explanation = Explanation(
        optimises=REVERSE_KL,
        used_by="the objective of arXiv:2504.10637, differentiated as a whole",
        caution="noisier than RaoBlackwell: it credits tokens with earlier KLs, which they cannot change",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellLite(DiscountedEstimator):
    """`RaoBlackwell` without a gradient through the vocabulary: the log ratio replaces grad KL_t.

    E[(r_t - KL_t) grad log p_t | prefix] is the gradient of KL_t, so only values of the KL are needed.
    """

    recipe = Recipe(value="kl", score=(Term("k1", "own"), Term("kl", "own", -1.0), Term("kl", "after")))
    explanation = Explanation(optimises=REVERSE_KL)


@final
@dataclass(frozen=True, kw_only=True)
class NoKL(ComposedEstimator):
    """No KL term. Rewards keep their baseline and off-policy correction."""

    recipe = Recipe(value=None)
    explanation = Explanation(
        optimises="the gradient of the reward alone",
        used_by="training without a reference",
    )
