"""Six estimates of the KL from the k most likely tokens that other software uses, for study.

Notation as in `lit_klrb.estimators.topk`. All have the credit of `RaoBlackwell`; other software uses them
without credit for the future, which is discount 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import Explanation, Recipe, Term
from lit_klrb.estimators.recipe import PerToken
from lit_klrb.estimators.topk import TopKEstimator
from lit_klrb.functional import TokenStats
from lit_klrb.functional.topk import outside_head, sampled_term

_EXACT = "the gradient of KL(policy || reference)"
_INSTEAD = "use RaoBlackwellTopK"


def _recipe(
    head: Callable[[TokenStats], Tensor], tail: Callable[[TokenStats], Tensor] | None = None
) -> Recipe:
    """The sum over H, known before the token is drawn, and a term of the sampled token."""
    value = PerToken("K_{0}", before=head, through=tail)
    return Recipe(value=value, score=(Term(value, "after"),), pathwise=value)


def _sums(stats: TokenStats) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over H: p r - p + q, p, and q."""
    kl, mass, ref_mass = stats.head_kl, stats.head_mass, stats.ref_head_mass
    if kl is None or mass is None or ref_mass is None:
        raise ConfigurationError("stats.head_kl is None; this estimate needs statistics with topk")
    return kl, mass, ref_mass


def _excess(stats: TokenStats) -> Tensor:
    """Sum over H of p r - p + q."""
    return _sums(stats)[0]


def _nothing(stats: TokenStats) -> Tensor:
    return torch.zeros_like(stats.logprobs)


def _truncated(stats: TokenStats) -> Tensor:
    """Sum over H of p r."""
    kl, mass, ref_mass = _sums(stats)
    return kl + mass - ref_mass


def _renormalised(stats: TokenStats) -> Tensor:
    """The KL of both heads, each scaled to sum to 1."""
    _, mass, ref_mass = _sums(stats)
    present = mass > 0  # padding has no head
    mass, ref_mass = (torch.where(present, field, 1) for field in (mass, ref_mass))
    return torch.where(present, _truncated(stats) / mass - mass.log() + ref_mass.log(), 0)


def _detached_tail(stats: TokenStats) -> Tensor:
    log_ratio = outside_head(stats, stats.logprobs - stats.ref_logprobs)
    return sampled_term(stats, log_ratio, log_ratio)


def _weighted_tail(stats: TokenStats) -> Tensor:
    log_ratio = stats.logprobs - stats.ref_logprobs
    return sampled_term(stats, outside_head(stats, log_ratio), outside_head(stats, 1 + log_ratio))


def _baseline(stats: TokenStats) -> Tensor:
    log_ratio = stats.logprobs - stats.ref_logprobs
    return sampled_term(stats, log_ratio, log_ratio - _truncated(stats))


@final
@dataclass(frozen=True, kw_only=True)
class TopKTruncated(TopKEstimator):
    """The sum over the head alone."""

    recipe = _recipe(_truncated)
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

    recipe = _recipe(_renormalised)
    estimate: ClassVar[str] = "sum_H (p / P) (r - log(P / Q)), P = sum_H p, Q = sum_H q"
    refusal = f"it does not see the probability of the head, only its shape; {_INSTEAD}"
    explanation = Explanation(
        optimises="the KL given that the token is in H",
        used_by="tinker-cookbook (issue 677), without credit for the future",
    )


@final
@dataclass(frozen=True, kw_only=True)
class TopKHeadOnly(TopKEstimator):
    """The head of `RaoBlackwellTopK` without its sampled tail."""

    recipe = _recipe(_excess)
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

    recipe = _recipe(_truncated, _detached_tail)
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

    recipe = _recipe(_truncated, _weighted_tail)
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

    recipe = _recipe(_nothing, _baseline)
    estimate: ClassVar[str] = "r_t, with gradient (r_t - sum_H p r) grad log p(y_t)"
    explanation = Explanation(
        optimises=_EXACT,
        used_by="vOPD (arXiv:2605.07865), without credit for the future",
        caution="hardly less noisy than MonteCarloRewardToGo",
    )


RIVALS: tuple[type[TopKEstimator], ...] = (
    TopKBaseline,
    TopKDetachedTail,
    TopKHeadOnly,
    TopKRenormalised,
    TopKTruncated,
    TopKWeightedTail,
)
