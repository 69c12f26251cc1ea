"""KL(policy || reference) from the k most likely tokens, the head H, and the sampled one.

The full vocabulary needs memory, so implementations often keep only the k most likely tokens of one model.
Whether value and gradient remain unbiased depends on how the other tokens are treated. `kl_topk` is unbiased
in both and never negative; the other estimates are used elsewhere and are included for study.

An estimate has two parts, a sum over H and a term of the sampled token. Its value estimates the token's KL in
nats; its gradient, for tokens sampled from the policy, estimates that KL's gradient given the prefix. r(v) is
the log ratio log p(v) - log q(v).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.kl import kl_k3_per_token
from lit_klrb.functional.logprobs import TokenStats


class SampledTerm(NamedTuple):
    """A term of the sampled token y_t, detached.

    Args:
        value: Its value, shape [B, T].
        coefficient: Its gradient is this times grad log p(y_t), shape [B, T].
    """

    value: Tensor
    coefficient: Tensor


class TopKEstimate(NamedTuple):
    """An estimate of every token's KL.

    Args:
        head: The sum over H, known before the token is drawn; differentiable.
        tail: The term of the sampled token; None for none.
    """

    head: Callable[[TokenStats], Tensor]
    tail: Callable[[TokenStats], SampledTerm] | None = None

    def __call__(self, stats: TokenStats) -> Tensor:
        """The estimate, shape [B, T]; differentiable."""
        return self.head(stats) + self.sampled(stats)

    def sampled(self, stats: TokenStats) -> Tensor:
        """The term of the sampled token, shape [B, T]; differentiable."""
        if self.tail is None:
            return torch.zeros_like(stats.logprobs)
        with torch.no_grad():
            value, coefficient = self.tail(stats)
        # An infinite log ratio times the difference, which is 0, would be NaN
        limit = torch.finfo(value.dtype).max
        return value + coefficient.clamp(-limit, limit) * (stats.logprobs - stats.logprobs.detach())


def _sums(stats: TokenStats) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over H: p r - p + q, p, and q."""
    kl, mass, ref_mass = stats.head_kl, stats.head_mass, stats.ref_head_mass
    if kl is None or mass is None or ref_mass is None:
        raise ConfigurationError("stats.head_kl is None; this estimate needs statistics with topk")
    return kl, mass, ref_mass


def _excess(stats: TokenStats) -> Tensor:
    """Sum over H of p r - p + q."""
    return _sums(stats)[0]


def _excess_or_kl(stats: TokenStats) -> Tensor:
    """The same; without a head, that over the whole vocabulary, which is the exact KL."""
    return stats.kl if stats.head_kl is None and stats.kl is not None else _excess(stats)


def kl_known(stats: TokenStats) -> Tensor:
    """The KL of each token, exact where the statistics have it, otherwise `kl_topk`; shape [B, T]."""
    return kl_topk(stats) if stats.kl is None else stats.kl


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


def _bucket(stats: TokenStats) -> Tensor:
    """The KL of both models with all tokens outside H merged into one."""
    _, mass, ref_mass = _sums(stats)
    tail, ref_tail = (1 - mass).clamp(min=0), (1 - ref_mass).clamp(min=0)
    inside = (tail > 0) & (ref_tail > 0)
    tail, ref_tail = (torch.where(inside, field, 1) for field in (tail, ref_tail))
    return _truncated(stats) + torch.where(inside, tail * (tail.log() - ref_tail.log()), 0)


def _nothing(stats: TokenStats) -> Tensor:
    return torch.zeros_like(stats.logprobs)


def _outside(stats: TokenStats, values: Tensor) -> Tensor:
    """The values where the sampled token is outside H, 0 elsewhere."""
    return _nothing(stats) if stats.in_head is None else torch.where(stats.in_head > 0, 0, values)


def kl_topk_tail(stats: TokenStats) -> SampledTerm:
    """The term of the sampled token of `kl_topk`: value k3(r) and gradient r grad log p(y_t) outside H."""
    log_ratio = stats.logprobs - stats.ref_logprobs
    k3 = kl_k3_per_token(stats.logprobs, stats.ref_logprobs)
    return SampledTerm(_outside(stats, k3), _outside(stats, log_ratio))


def _detached_tail(stats: TokenStats) -> SampledTerm:
    log_ratio = _outside(stats, stats.logprobs - stats.ref_logprobs)
    return SampledTerm(log_ratio, log_ratio)


def _weighted_tail(stats: TokenStats) -> SampledTerm:
    log_ratio = stats.logprobs - stats.ref_logprobs
    return SampledTerm(_outside(stats, log_ratio), _outside(stats, 1 + log_ratio))


def _baseline(stats: TokenStats) -> SampledTerm:
    log_ratio = stats.logprobs - stats.ref_logprobs
    return SampledTerm(log_ratio, log_ratio - _truncated(stats))


# Reference of each: see the estimators of `lit_klrb.estimators.topk`
TOPK_ESTIMATES = {
    "topk": TopKEstimate(_excess_or_kl, kl_topk_tail),
    "topk_truncated": TopKEstimate(_truncated),
    "topk_renormalised": TopKEstimate(_renormalised),
    "topk_tail_bucket": TopKEstimate(_bucket),
    "topk_head_only": TopKEstimate(_excess),
    "topk_detached_tail": TopKEstimate(_truncated, _detached_tail),
    "topk_weighted_tail": TopKEstimate(_truncated, _weighted_tail),
    "topk_baseline": TopKEstimate(_nothing, _baseline),
}


def kl_topk(stats: TokenStats) -> Tensor:
    """Exact head, sampled tail: the sum over H of (p r - p + q), plus k3(r(y_t)) if y_t is outside H.

    Unbiased as a value and as a gradient, and never negative. The sum over the vocabulary of p r - p + q is
    the KL, because p and q both add up to 1, and no summand is negative. k3 = r + exp(-r) - 1 is that summand
    over p, so its mean over the tail is the tail's sum. The gradient of the sampled term is
    r grad log p(y_t), that of the importance weight p(y_t) / sg p(y_t) times k3.

    Args:
        stats: Statistics with a `TopK`; without one, the result is the exact KL.

    Returns:
        Nats, shape [B, T]; differentiable.

    Example:
        >>> from lit_klrb.functional import TopK, token_stats
        >>> coin, fair = torch.tensor([[[0.7, 0.3]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
        >>> stats = [token_stats(coin, fair, torch.tensor([[y]]), topk=TopK(1)) for y in (0, 1)]
        >>> round(0.7 * kl_topk(stats[0]).item() + 0.3 * kl_topk(stats[1]).item(), 4)
        0.0823
    """
    return TOPK_ESTIMATES["topk"](stats)
