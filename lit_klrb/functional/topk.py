"""KL(policy || reference) from the k most likely tokens, the head H, and the sampled one.

The full vocabulary needs memory, so implementations often keep only the k most likely tokens of one model.
Whether value and gradient remain unbiased depends on how the other tokens are treated. `kl_topk` is unbiased
in both and never negative; the estimates of other software are in `replication.topk_rivals`.

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


def head_sums(stats: TokenStats) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over H: p r - p + q, p, and q."""
    kl, mass, ref_mass = stats.head_kl, stats.head_mass, stats.ref_head_mass
    if kl is None or mass is None or ref_mass is None:
        raise ConfigurationError("stats.head_kl is None; this estimate needs statistics with topk")
    return kl, mass, ref_mass


def _excess(stats: TokenStats) -> Tensor:
    """Sum over H of p r - p + q; without a head, that over the whole vocabulary, which is the exact KL."""
    return stats.kl if stats.head_kl is None and stats.kl is not None else head_sums(stats)[0]


def kl_known(stats: TokenStats) -> Tensor:
    """The KL of each token, exact where the statistics have it, otherwise `kl_topk`; shape [B, T]."""
    return kl_topk(stats) if stats.kl is None else stats.kl


def outside_head(stats: TokenStats, values: Tensor) -> Tensor:
    """The values where the sampled token is outside H, 0 elsewhere."""
    return torch.zeros_like(values) if stats.in_head is None else torch.where(stats.in_head > 0, 0, values)


def kl_topk_tail(stats: TokenStats) -> SampledTerm:
    """The term of the sampled token of `kl_topk`: value k3(r) and gradient r grad log p(y_t) outside H."""
    log_ratio = stats.logprobs - stats.ref_logprobs
    k3 = kl_k3_per_token(stats.logprobs, stats.ref_logprobs)
    return SampledTerm(outside_head(stats, k3), outside_head(stats, log_ratio))


TOPK = TopKEstimate(_excess, kl_topk_tail)


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
    return TOPK(stats)
