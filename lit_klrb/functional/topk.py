"""KL(policy || reference) from the k most likely tokens, the head H, and the sampled one.

The full vocabulary needs memory, so implementations often keep only the k most likely tokens of one model.
Whether value and gradient remain unbiased depends on how the other tokens are treated. `kl_topk` is unbiased
in both and never negative; the estimates of other software are in `replication.topk_rivals`.

An estimate has two parts, a sum over H and a term of the sampled token. Its value estimates the token's KL in
nats; its gradient, for tokens sampled from the policy, estimates that KL's gradient given the prefix. r(v) is
the log ratio log p(v) - log q(v).
"""

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.credit import MAX_EXPONENT
from lit_klrb.functional.kl import kl_k3_per_token
from lit_klrb.functional.logprobs import TokenStats


def head_excess(stats: TokenStats) -> Tensor:
    """Sum over H of p r - p + q; without a head, that over the whole vocabulary, which is the exact KL."""
    excess = stats.kl if stats.head_kl is None else stats.head_kl
    if excess is None:
        raise ConfigurationError("stats.head_kl is None; this estimate needs statistics with topk")
    return excess


def head_forward_excess(stats: TokenStats) -> Tensor:
    """As `head_excess` with p and q exchanged: of the forward KL, KL(q || p)."""
    excess = stats.forward_kl if stats.head_kl is None else stats.head_forward_kl
    if excess is None:
        problem = "is None; this estimate needs statistics with topk"
        raise ConfigurationError(problem, key="stats.head_forward_kl")
    return excess


def kl_known(stats: TokenStats) -> Tensor:
    """The KL of each token, exact where the statistics have it, otherwise `kl_topk`; shape [B, T]."""
    return kl_topk(stats) if stats.kl is None else stats.kl


def outside_head(stats: TokenStats, values: Tensor) -> Tensor:
    """The values where the sampled token is outside H, 0 elsewhere."""
    return torch.zeros_like(values) if stats.in_head is None else torch.where(stats.in_head > 0, 0, values)


def sampled_term(stats: TokenStats, value: Tensor, coefficient: Tensor) -> Tensor:
    """A term of the sampled token y_t with a value, and the gradient coefficient grad log p(y_t), [B, T]."""
    # An infinite log ratio times the difference, which is 0, would be NaN
    limit = torch.finfo(value.dtype).max
    slope = coefficient.detach().clamp(-limit, limit)
    return value.detach() + slope * (stats.logprobs - stats.logprobs.detach())


def sampled_tail(stats: TokenStats) -> Tensor:
    """The term of the sampled token of `kl_topk`: value k3(r) and gradient r grad log p(y_t) outside H."""
    log_ratio = stats.logprobs - stats.ref_logprobs
    k3 = kl_k3_per_token(stats.logprobs, stats.ref_logprobs)
    return sampled_term(stats, outside_head(stats, k3), outside_head(stats, log_ratio))


def sampled_forward_tail(stats: TokenStats) -> Tensor:
    """The rest of `head_forward_excess` as a term of the sampled token, of which it is the mean.

    With w = q / p, the value is w log w - w + 1, which is never negative, and the gradient that of its
    importance weight and of w: (1 - w) grad log p(y_t).
    """
    # As in k3, far below what is likely to be sampled, `exp` would overflow
    log_ratio = (stats.logprobs - stats.ref_logprobs).clamp(min=-MAX_EXPONENT)
    weight = (-log_ratio).exp()
    value = torch.where(weight > 0, (-weight * log_ratio - torch.expm1(-log_ratio)).clamp(min=0), 1)
    return sampled_term(stats, outside_head(stats, value), outside_head(stats, 1 - weight))


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
    return head_excess(stats) + sampled_tail(stats)


def kl_coarsened(stats: TokenStats) -> Tensor:
    """The KL of distributions with k + 1 outcomes: the tokens of H, and all others merged into one.

    sum_H p r + (1 - P) log((1 - P) / (1 - Q)) with the masses P and Q of H: a lower bound of the KL, which
    lacks (1 - P) times the KL given that the token is outside H. Masses outside H below the rounding error
    of 1 count as that error.

    Args:
        stats: Statistics with a `TopK`; without one, the result is the exact KL.

    Returns:
        Nats, shape [B, T]; never negative, differentiable.
    """
    excess, mass, ref_mass = head_excess(stats), stats.head_mass, stats.ref_head_mass
    if mass is None or ref_mass is None:
        return excess
    smallest = torch.finfo(mass.dtype).eps
    tail, ref_tail = ((1 - each).clamp(min=smallest) for each in (mass, ref_mass))
    # As over H, p r - p + q: both masses are of the same tokens, so what is added sums to 0
    return excess + tail * (tail.log() - ref_tail.log()) - tail + ref_tail
