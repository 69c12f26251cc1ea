"""KL(policy || reference) from the k most likely tokens and the sampled one.

The full vocabulary needs memory, so implementations often keep only the k most likely tokens of one model.
Whether value and gradient remain unbiased depends on how the other tokens are treated. `kl_topk` is unbiased
in both and never negative; the other functions are used elsewhere and are included for study.

Every function returns [B, T]. Its value estimates the token's KL in nats; its gradient, for tokens sampled
from the policy, estimates that KL's gradient given the prefix. Notation: H are the k tokens, r(v) is the log
ratio log p(v) - log q(v), sg stops the gradient; rho = p(y_t) / sg p(y_t) is 1, and its gradient is that of
log p(y_t).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.kl import kl_control_variate
from lit_klrb.functional.logprobs import full_precision

Support = Literal["policy", "reference"]


class TopK(NamedTuple):
    """The log-probabilities of k tokens and of the sampled token under both models.

    Args:
        head: log p(v) of the k tokens v in H, shape [B, T, k]; differentiable.
        ref_head: log q(v) of the same tokens, shape [B, T, k].
        logprobs: log p(y_t) of the sampled tokens, shape [B, T]; differentiable.
        ref_logprobs: log q(y_t) of the sampled tokens, shape [B, T].
        in_head: Whether y_t is in H, bool, shape [B, T].
    """

    head: Tensor
    ref_head: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    in_head: Tensor


def topk_stats(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    k: int,
    support: Support = "policy",
    temperature: float = 1.0,
) -> TopK:
    """Log-probabilities of the k most likely tokens and of the sampled ones.

    Args:
        logits: Policy logits, shape [B, T, V]; differentiable.
        ref_logits: Reference logits, shape [B, T, V].
        tokens: Token ids sampled from the policy, shape [B, T].
        k: Number of tokens kept, 1 to V.
        support: The model whose most likely tokens are used.
        temperature: The sampling temperature; the logits of both models are divided by it.

    Raises:
        ConfigurationError: If k is out of range or the support unknown.

    Example:
        >>> logits = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
        >>> stats = topk_stats(logits, logits, torch.tensor([[2]]), k=2)
        >>> [round(p, 3) for p in stats.head.exp().flatten().tolist()], stats.in_head.item()
        ([0.5, 0.3], False)
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ConfigurationError(f"must be between 1 and V = {logits.shape[-1]}, got {k}", key="k")
    if support not in get_args(Support):
        raise ConfigurationError(f"must be policy or reference, got {support!r}", key="support")
    policy, reference = (
        (full_precision(values) / temperature).log_softmax(-1) for values in (logits, ref_logits)
    )
    # Which tokens are kept is not differentiated: the choice is constant almost everywhere
    kept = (policy if support == "policy" else reference).detach().topk(k, dim=-1).indices
    index = tokens[..., None]
    return TopK(
        policy.gather(-1, kept),
        reference.gather(-1, kept),
        policy.gather(-1, index).squeeze(-1),
        reference.gather(-1, index).squeeze(-1),
        (kept == index).any(-1),
    )


def kl_topk(stats: TopK) -> Tensor:
    """Exact head, sampled tail: sum over H of (p r - p + q), plus rho k3(r(y_t)) if y_t is outside H.

    Unbiased as a value and as a gradient, and never negative. The sum over the vocabulary of p r - p + q is
    the KL, because p and q both add up to 1, and no summand is negative. k3 = r + exp(-r) - 1 is that summand
    over p, so its mean over the tail is the tail's sum; the gradient of rho k3 is r grad log p(y_t).

    Example:
        >>> coin, fair = torch.tensor([[[0.7, 0.3]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
        >>> values = [kl_topk(topk_stats(coin, fair, torch.tensor([[y]]), k=1)).item() for y in (0, 1)]
        >>> round(0.7 * values[0] + 0.3 * values[1], 4)
        0.0823
    """
    log_ratio = stats.logprobs - stats.ref_logprobs
    tail = _rho(stats) * kl_control_variate(log_ratio, alpha=1.0)
    return _head_excess(stats) + torch.where(stats.in_head, 0, tail)


def topk_truncated(stats: TopK) -> Tensor:
    """The sum of p r over H alone: biased in value and gradient, can be negative.

    Reference: verl, issue 5041.
    """
    return _head_kl(stats)


def topk_renormalised(stats: TopK) -> Tensor:
    """The KL of both heads, each scaled to sum to 1: biased in value and gradient, never negative.

    Reference: tinker-cookbook, issue 677.
    """
    head, ref_head = (values.log_softmax(-1) for values in (stats.head, stats.ref_head))
    return (head.exp() * (head - ref_head)).sum(-1)


def topk_tail_bucket(stats: TopK) -> Tensor:
    """The head, with the tail merged into one token: a lower bound of the KL with a biased gradient."""
    tail, ref_tail = (_tail_mass(values) for values in (stats.head, stats.ref_head))
    inside = (tail > 0) & (ref_tail > 0)
    tail, ref_tail = (torch.where(inside, values, 1) for values in (tail, ref_tail))
    return _head_kl(stats) + torch.where(inside, tail * (tail.log() - ref_tail.log()), 0)


def topk_head_only(stats: TopK) -> Tensor:
    """The sum over H of (p r - p + q): a lower bound of the KL, never negative, its gradient biased.

    Reference: MOPD, arXiv:2606.30406.
    """
    return _head_excess(stats)


def topk_detached_tail(stats: TopK) -> Tensor:
    """The head, plus sg(r) rho outside it: unbiased as a value; its gradient has the head's mass too much.

    The mean gradient is that of the KL plus that of sum over H of p.

    Reference: the released code of EMA-PG, arXiv:2602.04417.
    """
    log_ratio = (stats.logprobs - stats.ref_logprobs).detach()
    return _head_kl(stats) + torch.where(stats.in_head, 0, log_ratio * _rho(stats))


def topk_weighted_tail(stats: TopK) -> Tensor:
    """The head, plus a tail whose gradient is (1 + r) grad log p(y_t): unbiased, noisy, can be negative.

    Reference: NeMo-RL, pull request 3608.
    """
    log_ratio = (stats.logprobs - stats.ref_logprobs).detach()
    rho = _rho(stats)
    return _head_kl(stats) + torch.where(stats.in_head, 0, log_ratio * rho + rho - 1)


def topk_baseline(stats: TopK) -> Tensor:
    """The sampled log ratio, with the head's sum of p r as the baseline of its score: unbiased.

    Value r(y_t), gradient (r(y_t) - sum over H of p r) grad log p(y_t), hardly less noisy than without it.

    Reference: vOPD, arXiv:2605.07865.
    """
    log_ratio = (stats.logprobs - stats.ref_logprobs).detach()
    return log_ratio + (log_ratio - _head_kl(stats).detach()) * (_rho(stats) - 1)


TOPK_ESTIMATES: dict[str, Callable[[TopK], Tensor]] = {
    "exact head, k3 tail": kl_topk,
    "truncated": topk_truncated,
    "renormalised": topk_renormalised,
    "tail bucket": topk_tail_bucket,
    "head only (MOPD)": topk_head_only,
    "detached tail (EMA-PG)": topk_detached_tail,
    "weighted tail (NeMo-RL)": topk_weighted_tail,
    "baseline (vOPD)": topk_baseline,
}


def _head_kl(stats: TopK) -> Tensor:
    return (stats.head.exp() * (stats.head - stats.ref_head)).sum(-1)


def _head_excess(stats: TopK) -> Tensor:
    """Sum over H of p r - p + q = p k3(r), without the cancellation of large terms."""
    return (stats.head.exp() * kl_control_variate(stats.head - stats.ref_head, alpha=1.0)).sum(-1)


def _tail_mass(head: Tensor) -> Tensor:
    return (1 - head.exp().sum(-1)).clamp(min=0)


def _rho(stats: TopK) -> Tensor:
    return (stats.logprobs - stats.logprobs.detach()).exp()
