"""Divergences as sums over the vocabulary or a part of it, in a form that keeps their precision."""

import math
from typing import Any

import torch
from torch import Tensor

# exp(-log_ratio) is not formed for log ratios below minus this: it would overflow in float32.
_MAX_LOG_RATIO = 60.0


def full_precision(values: Tensor) -> Tensor:
    """Convert half precision to float32; float32 and float64 are returned unchanged."""
    return values if values.dtype == torch.float64 else values.float()


def probabilities_of(logprobs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """exp(logprobs), with 0 in place of what is below the smallest normal number of the dtype.

    Such numbers lose their digits, and devices disagree whether they are 0.

    Args:
        logprobs: Of tokens or of blocks of tokens, any shape.
        dtype: That of the computation, if `logprobs` has more digits.
    """
    values = logprobs.exp()
    return torch.where(values < torch.finfo(dtype or values.dtype).tiny, 0, values)


def kl_sum(policy: Tensor, reference: Tensor, probabilities: Tensor) -> Tensor:
    """Sum over the last dimension of p (r + exp(-r) - 1) = p r + q - p, with r the log ratio.

    Args:
        policy: log p, shape [..., V].
        reference: log q, shape [..., V].
        probabilities: p by `probabilities_of`, shape [..., V].

    Returns:
        The KL over the whole vocabulary; over a part of it, a lower bound. Shape [...].
    """
    present = probabilities > 0
    infinite = present & (reference == -torch.inf)
    log_ratio = torch.where(present & ~infinite, policy - reference, 0)
    # q - p, written p expm1(-r) where p and q are close, so that their difference keeps its precision. The
    # clamp keeps the branch that `where` discards finite: its gradient would be inf * 0 = NaN otherwise.
    excess = probabilities * torch.expm1((-log_ratio).clamp(max=_MAX_LOG_RATIO))
    extreme = ~present | (log_ratio < -_MAX_LOG_RATIO)
    excess = torch.where(extreme, reference.exp() - probabilities, excess)
    apply: Any = _InfiniteWhere.apply
    total: Tensor = apply((probabilities * log_ratio + excess).sum(-1), infinite.any(-1))
    return total


def jsd_sum(policy: Tensor, reference: Tensor, weight: float) -> Tensor:
    """The Jensen-Shannon divergence D_w = [w KL(p || m) + (1 - w) KL(q || m)] / (w (1 - w)).

    m is the mixture w p + (1 - w) q. Divided by w (1 - w), the divergence is continuous in w, and its
    gradients are of about one size: D_0 is KL(p || q) and D_1 is KL(q || p). For 0 < w < 1 it is finite even
    if one model excludes a token.

    Args:
        policy: log p, shape [..., V].
        reference: log q, shape [..., V].
        weight: w, 0 to 1.

    Returns:
        Nats, shape [...].

    Example:
        >>> coin, fair = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
        >>> [round(jsd_sum(coin, fair, weight).item(), 4) for weight in (0.0, 0.01, 0.5, 1.0)]
        [0.0823, 0.0823, 0.084, 0.0872]

    Reference: Lin (1991), "Divergence measures based on the Shannon entropy", up to the factor.
    """
    p, q = probabilities_of(policy), probabilities_of(reference)
    if weight in (0, 1):
        return kl_sum(policy, reference, p) if weight == 0 else kl_sum(reference, policy, q)
    # Where both exclude a token, the derivative of log(0 + 0) would be NaN
    log_p, log_q = (values.clamp(min=torch.finfo(values.dtype).min) for values in (policy, reference))
    mixture = torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))
    return kl_sum(policy, mixture, p) / (1 - weight) + kl_sum(reference, mixture, q) / weight


class _InfiniteWhere(torch.autograd.Function):
    """+inf where a mask says so. Its gradient is NaN there; but 0 where it has no weight, not 0 * inf."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, infinite: Tensor) -> Tensor:
        ctx.save_for_backward(infinite)
        return values.masked_fill(infinite, torch.inf)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (infinite,) = ctx.saved_tensors
        return upstream.masked_fill(infinite & (upstream != 0), torch.nan), None
