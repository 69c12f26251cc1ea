"""Estimators whose gradient is that of KL(policy || reference) in expectation.

Notation: r_t = log p(y_t) - log q(y_t) (the log ratio), KL_t = KL(p || q) over the vocabulary at t.
"""

from dataclasses import dataclass
from typing import final

from lit_klrb.estimators.base import Explanation
from lit_klrb.estimators.composed import ComposedEstimator, DiscountedEstimator
from lit_klrb.estimators.recipe import Recipe, Term

_EXACT = "the gradient of KL(policy || reference), exactly"


@final
@dataclass(frozen=True, kw_only=True)
class MonteCarlo(ComposedEstimator):
    """The log ratio of the whole sequence as a reward: c_t = sum over all s of r_s.

    The usual KL penalty of RLHF, reward - beta sum_t r_t, with the same credit for every token.

    Reference: Ahmadian et al. (2024), "Back to basics: revisiting REINFORCE style optimization".
    """

    recipe = Recipe(value="k1", score=(Term("k1", "whole"),))
    explanation = Explanation(
        optimises=_EXACT,
        used_by="TRL RLOO, verl RLOO",
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
        optimises=_EXACT,
        used_by="OpenRLHF",
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwell(DiscountedEstimator):
    """The exact per-token KL in place of the log ratio: c_t = sum over s > t of KL_s, l_t = KL_t.

    Reference: Amini, Vieira, Cotterell (2025), "Better estimation of the KL divergence between language
    models", arXiv:2504.10637, Theorem 4.
    """

    has_counterexample = True
    recipe = Recipe(value="kl", score=(Term("kl", "after"),), pathwise="kl")
    explanation = Explanation(
        optimises=_EXACT,
        used_by="nikolageorgiev2000/apart (commit 2000773, 2026-07-25), divided by the tokens of the batch",
        caution=(
            "given the prefix, no step has more variance than MonteCarlo's, but the sum over a sequence can."
            " Example with two tokens: p(a) = p(b) = 1/2, q(a) = 0.3, q(b) = 0.7; after a both models agree,"
            " after b p is certain of a token to which q gives 3/7. Every sequence has log ratio 0.511:"
            " MonteCarlo's variance is 0, RaoBlackwell's is not"
        ),
    )


@final
@dataclass(frozen=True, kw_only=True)
class RaoBlackwellSequence(ComposedEstimator):
    """The exact per-token KL, summed over the whole sequence: c_t = sum over all s of KL_s, l_t = KL_t."""

    recipe = Recipe(value="kl", score=(Term("kl", "whole"),), pathwise="kl")
    explanation = Explanation(
        optimises=_EXACT,
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
    explanation = Explanation(
        optimises=_EXACT,
    )


@final
@dataclass(frozen=True, kw_only=True)
class NoKL(ComposedEstimator):
    """No KL term. Rewards keep their baseline and off-policy correction."""

    recipe = Recipe(value=None)
    explanation = Explanation(
        optimises="nothing: there is no KL term",
        used_by="training without a reference",
    )
