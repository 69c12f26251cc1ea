"""The KL of next-token distributions when only k tokens of the vocabulary are kept.

Each function gives `(value, loss)` per position: the estimate of KL(p || q) in nats, and a term whose
gradient in the policy's logits estimates the KL's. The head S is a set of k tokens, most often the likeliest
of one of the models; y is the token sampled from p. The head is a constant: no gradient flows to the choice.

Notation: r_v = log p_v - log q_v, w = p_y / sg(p_y) a ratio that is 1 and carries the gradient of log p_y.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError


class Head(NamedTuple):
    """What is kept of both models at each position.

    Args:
        logprobs: log p_v of the k tokens of the head, shape [..., k]; differentiable.
        ref_logprobs: log q_v of the same, shape [..., k].
        token: log p_y of the sampled token, shape [...]; differentiable.
        ref_token: log q_y, shape [...].
        inside: Whether y is in the head, bool [...].
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    token: Tensor
    ref_token: Tensor
    inside: Tensor


class TopKEstimate(NamedTuple):
    """An estimate at each position.

    Args:
        value: Of the KL, in nats, shape [...]; detached.
        loss: Differentiable term whose gradient estimates the KL's, shape [...].
    """

    value: Tensor
    loss: Tensor


def head_of(logits: Tensor, ref_logits: Tensor, tokens: Tensor, head: Tensor) -> Head:
    """The head of given tokens, from whole logits.

    Args:
        logits: Policy logits, shape [..., V].
        ref_logits: Reference logits, shape [..., V].
        tokens: Sampled tokens, shape [...].
        head: Tokens of the head, shape [..., k], no one twice.

    Raises:
        ConfigurationError: If the shapes do not fit.
    """
    if (
        logits.shape != ref_logits.shape
        or logits.shape[:-1] != tokens.shape
        or head.shape[:-1] != tokens.shape
    ):
        shapes = [list(tensor.shape) for tensor in (logits, ref_logits, tokens, head)]
        raise ConfigurationError(
            f"logits, ref_logits, tokens, head have shapes {shapes}; "
            "[..., V], [..., V], [...], [..., k] expected"
        )
    policy, reference = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    index = tokens.unsqueeze(-1)
    return Head(
        policy.gather(-1, head),
        reference.gather(-1, head),
        policy.gather(-1, index).squeeze(-1),
        reference.gather(-1, index).squeeze(-1),
        (head == index).any(-1),
    )


def top_k_truncated(head: Head) -> TopKEstimate:
    """The head's part of the sum: sum over S of p r. Biased; negative where the head has less mass under p.

    In use: verl#5041.
    """
    return _estimate((head.logprobs.exp() * (head.logprobs - head.ref_logprobs)).sum(-1))


def top_k_renormalised(head: Head) -> TopKEstimate:
    """The KL of the two distributions given that the token is in the head. Biased.

    In use: tinker-cookbook#677.
    """
    policy, reference = head.logprobs.log_softmax(-1), head.ref_logprobs.log_softmax(-1)
    return _estimate((policy.exp() * (policy - reference)).sum(-1))


def top_k_tail_bucket(head: Head) -> TopKEstimate:
    """The KL with all other tokens as one: a lower bound of the KL (the log-sum inequality). Biased.

    In use: verl#7855, miles#1322, slime#2033.
    """
    tail, ref_tail = (_tail(values.exp()) for values in (head.logprobs, head.ref_logprobs))
    kept = (head.logprobs.exp() * (head.logprobs - head.ref_logprobs)).sum(-1)
    return _estimate(kept + tail * (tail / ref_tail).log())


def top_k_generalised(head: Head) -> TopKEstimate:
    """The head's part of the generalised KL: sum over S of p r - p + q, every summand >= 0. A lower bound.

    In use: MOPD (arXiv:2606.30406).
    """
    return _estimate(_generalised_head(head))


def top_k_ratio_tail(head: Head) -> TopKEstimate:
    """The truncated head, and w sg(r_y) for a token outside it: biased by the gradient of the head's mass.

    In use: EMA-PG's released code (arXiv:2602.04417), as unbiased.
    """
    kept = (head.logprobs.exp() * (head.logprobs - head.ref_logprobs)).sum(-1)
    log_ratio = (head.token - head.ref_token).detach()
    return _estimate(kept + torch.where(head.inside, 0, _ratio(head) * log_ratio))


def top_k_one_plus_ratio_tail(head: Head) -> TopKEstimate:
    """The truncated head, and w sg(1 + r_y) for a token outside it, less 1 in the value. Unbiased, noisy.

    In use: NeMo-RL#3608.
    """
    kept = (head.logprobs.exp() * (head.logprobs - head.ref_logprobs)).sum(-1)
    log_ratio = (head.token - head.ref_token).detach()
    loss = kept + torch.where(head.inside, 0, _ratio(head) * (1 + log_ratio))
    value = kept + torch.where(head.inside, 0, log_ratio)
    return TopKEstimate(value.detach(), loss)


def top_k_score(head: Head) -> TopKEstimate:
    """The log ratio as a score with the truncated head as its baseline. Unbiased, as noisy as k1.

    In use: vOPD (arXiv:2605.07865).
    """
    log_ratio = (head.token - head.ref_token).detach()
    baseline = (head.logprobs.exp() * (head.logprobs - head.ref_logprobs)).sum(-1).detach()
    return TopKEstimate(log_ratio, (log_ratio - baseline) * head.token)


def top_k_unbiased(head: Head) -> TopKEstimate:
    """The generalised head, and w k3(r_y) for a token outside it: unbiased, and never negative.

    The sum over the whole vocabulary of p r - p + q is the KL, as both distributions sum to 1. Its summands
    are p k3(r) >= 0 with k3(r) = r + exp(-r) - 1: those of the head are summed, those of the tail sampled.
    The gradient of w k3(r_y) is r_y grad log p_y and that of p r - p + q is r grad p, so that both parts add
    up to the gradient of the KL, the sum of r grad p.
    """
    log_ratio = head.token - head.ref_token
    k3 = torch.expm1(-log_ratio) + log_ratio
    return _estimate(_generalised_head(head) + torch.where(head.inside, 0, _ratio(head) * k3))


# Every estimate by name, those of others included.
TOP_K_ESTIMATES: dict[str, Callable[[Head], TopKEstimate]] = {
    "truncated": top_k_truncated,
    "renormalised": top_k_renormalised,
    "tail_bucket": top_k_tail_bucket,
    "generalised": top_k_generalised,
    "ratio_tail": top_k_ratio_tail,
    "one_plus_ratio_tail": top_k_one_plus_ratio_tail,
    "score": top_k_score,
    "unbiased": top_k_unbiased,
}


def _estimate(loss: Tensor) -> TopKEstimate:
    return TopKEstimate(loss.detach(), loss)


def _generalised_head(head: Head) -> Tensor:
    policy, reference = head.logprobs.exp(), head.ref_logprobs.exp()
    return (policy * (head.logprobs - head.ref_logprobs) - policy + reference).sum(-1)


def _ratio(head: Head) -> Tensor:
    return (head.token - head.token.detach()).exp()


def _tail(probabilities: Tensor) -> Tensor:
    # Rounding can leave a little less than nothing.
    return (1 - probabilities.sum(-1)).clamp(min=torch.finfo(probabilities.dtype).tiny)
