"""KL values: estimates of KL(policy || reference) in nats, for logging and for rewards.

Differentiating a value is in general not an estimate of the KL's gradient: train with `lit_klrb.estimators`.
"""

import torch
from torch import Tensor

from lit_klrb.functional.credit import MAX_EXPONENT


def kl_k1_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The log ratio log p(y_t) - log q(y_t): unbiased, of either sign.

    Args:
        logprobs: Log-probability of each sampled token under the policy, shape [B, T].
        ref_logprobs: The same tokens under the reference, shape [B, T].

    Example:
        >>> p, q = torch.tensor([0.25]), torch.tensor([0.05])
        >>> round(kl_k1_per_token(p.log(), q.log()).item(), 3)
        1.609

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return logprobs - ref_logprobs


def kl_k2_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log ratio: biased, small for models that are close.

    Args:
        logprobs: Log-probability of each sampled token under the policy, shape [B, T].
        ref_logprobs: The same tokens under the reference, shape [B, T].

    Example:
        >>> kl_k2_per_token(torch.tensor([-1.0]), torch.tensor([-3.0])).item()
        2.0

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return (logprobs - ref_logprobs).square() / 2


def kl_k3_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate r + exp(-r) - 1 with r the log ratio: unbiased and never negative.

    Args:
        logprobs: Log-probability of each sampled token under the policy, shape [B, T].
        ref_logprobs: The same tokens under the reference, shape [B, T].

    Returns:
        Shape [B, T]; -r is cut at `MAX_EXPONENT` before `exp`.

    Example:
        >>> round(kl_k3_per_token(torch.tensor([0.0]), torch.tensor([1.0])).item(), 4)
        0.7183

    Reference: Schulman (2020), "Approximating KL divergence".
    """
    return kl_control_variate(logprobs - ref_logprobs, alpha=1.0)


def kl_control_variate(log_ratio: Tensor, alpha: float | Tensor) -> Tensor:
    """R + alpha (exp(-R) - 1): unbiased for every alpha that does not depend on R, since E exp(-R) = 1.

    Args:
        log_ratio: Log ratios R, of tokens or of whole sequences, any shape.
        alpha: 1 is Schulman's k3, never negative, and of unbounded variance for whole sequences.

    Returns:
        The shape of `log_ratio`; -R is cut at `MAX_EXPONENT` before `exp`.

    Example:
        >>> kl_control_variate(torch.tensor([0.5]), alpha=0.0).item()
        0.5
    """
    return log_ratio + alpha * torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))


def kl_k3_increments(log_ratio: Tensor) -> Tensor:
    """Per-token increments of k3 of the running log ratio; they add up to k3 of the whole sequence.

    Args:
        log_ratio: Log ratio of each token, 0 outside the mask, shape [B, T].

    Example:
        >>> r = torch.tensor([[0.5, -0.25]])
        >>> bool(kl_k3_increments(r).sum() == kl_control_variate(r.sum(), alpha=1.0))
        True
    """
    running = kl_control_variate(log_ratio.cumsum(-1), alpha=1.0)
    return running.diff(dim=-1, prepend=torch.zeros_like(running[:, :1]))
