"""KL losses of known gradients, as people write them."""

import os

import torch

from lit_klrb import estimators
from lit_klrb.functional import TokenStats


def detached(logprobs, ref_logprobs, mask):
    return (logprobs - ref_logprobs).detach()


def k1(logprobs, ref_logprobs, mask):
    return logprobs - ref_logprobs


def k2(logprobs, ref_logprobs, mask):
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs, ref_logprobs, mask):
    log_ratio = logprobs - ref_logprobs
    return log_ratio + (-log_ratio).exp() - 1


def full(student_logits, teacher_logits, completion_mask):
    p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return ((p.exp() * (p - q)).sum(-1) * completion_mask).sum() / len(p)


def reinforce(log_prob, ref_log_prob, response_mask):
    """The score of a completion times the log ratio of all of it."""
    log_ratio = ((log_prob - ref_log_prob) * response_mask).sum(-1).detach()
    return (log_ratio * (log_prob * response_mask).sum(-1)).mean(), {"kl": log_ratio.mean()}


def sequence_k3(logprobs, ref_logprobs, mask):
    log_ratio = torch.where(mask, logprobs - ref_logprobs, 0).sum(-1)
    return log_ratio + (-log_ratio).exp() - 1


def teacher_samples(logits, ref_logits, tokens, mask):
    """Minus the student's log-likelihood of the teacher's samples, by importance weights."""
    index = tokens[..., None]
    p, q = (x.log_softmax(-1).gather(-1, index)[..., 0].where(mask, 0).sum(-1) for x in (logits, ref_logits))
    return -((q - p).exp().detach() * p).mean()


def leave_one_out(logprobs, ref_logprobs, mask):
    log_ratio = ((logprobs - ref_logprobs) * mask).sum(-1).detach()
    others = (log_ratio.sum() - log_ratio) / (len(log_ratio) - 1)
    return ((log_ratio - others) * (logprobs * mask).sum(-1)).mean()


def maximised(logprobs, ref_logprobs, mask):
    return -2 * reinforce(logprobs, ref_logprobs, mask)[0]


def scaled(lp, ref, mask, *, beta, extra=None):
    return beta * k2(lp, ref, mask)


def token_mean(logprobs, ref_logprobs, mask):
    return (k2(logprobs, ref_logprobs, mask) * mask).sum() / mask.sum()


def length_mean(logprobs, ref_logprobs, mask):
    return ((k2(logprobs, ref_logprobs, mask) * mask).sum(-1) / mask.sum(-1)).mean()


def batch_sum(logprobs, ref_logprobs, mask):
    return (k2(logprobs, ref_logprobs, mask) * mask).sum()


def position_mean(logprobs, ref_logprobs, mask):
    return (k2(logprobs, ref_logprobs, mask) * mask).mean()


def forgets_the_mask(logprobs, ref_logprobs, mask):
    return k2(logprobs, ref_logprobs, mask).sum(-1).mean()


def without_mask(logprobs, ref_logprobs):
    return k2(logprobs, ref_logprobs, None).mean()


def clamped(logprobs, ref_logprobs, mask):
    return k3(logprobs, ref_logprobs, mask).clamp(max=0.5)


def in_float32(logprobs, ref_logprobs, mask):
    return k3(logprobs.float(), ref_logprobs.float(), mask)


def jensen_shannon(logits, ref_logits, mask):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    m = torch.logaddexp(p, q) - torch.tensor(2.0).log()
    return ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2


def ratio_k3(logprobs, ref_logprobs, old_logprobs, mask):
    return (logprobs - old_logprobs).exp() * k3(logprobs, ref_logprobs, mask)


def whole_ratio(logprobs, ref_logprobs, old_logprobs, mask):
    ratio = torch.where(mask, logprobs - old_logprobs, 0).sum(-1).exp()
    return ratio * torch.where(mask, logprobs - ref_logprobs, 0).sum(-1).detach()


def grpo(logprobs, ref_logprobs, advantages, rewards, mask, /):
    return -(logprobs - logprobs.detach()).exp() * advantages[:, None] + 0.1 * k3(
        logprobs, ref_logprobs, mask
    )


def fails(logprobs, ref_logprobs, mask):
    raise KeyError("kl")


def fails_alone(logprobs, ref_logprobs, mask):
    if len(mask) < 2:
        raise ValueError("a group has at least two completions")
    return leave_one_out(logprobs, ref_logprobs, mask)


def infinite(logprobs, ref_logprobs, mask):
    return (logprobs - logprobs).log().sum()


def of_positions(logprobs, ref_logprobs, mask):
    return logprobs.sum(0)


def text(logprobs):
    return "0.1"


def unknown(logprobs, banana):
    return logprobs


def prefix_weighted(logprobs, ref_logprobs, old_logprobs, mask):
    estimator = estimators.MonteCarlo(baseline=None, off_policy="prefix")
    return estimator.surrogate(TokenStats(logprobs, ref_logprobs), mask, behaviour_logprobs=old_logprobs)


def top3(logits, ref_logits, mask):
    """The KL of each token over the policy's three most likely ones."""
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    head = p.topk(3).indices
    p, q = p.gather(-1, head), q.gather(-1, head)
    return (p.exp() * (p - q)).sum(-1)


def short_credit(logprobs, ref_logprobs, mask):
    """Credit for a token's own log ratio and the two after it."""
    log_ratio = torch.where(mask, logprobs - ref_logprobs, 0).detach()
    later = torch.nn.functional.pad(log_ratio, (0, 2))
    return (log_ratio + later[:, 1:-1] + later[:, 2:]) * logprobs


def clamped_at_20(logprobs, ref_logprobs, mask):
    log_ratio = (logprobs - ref_logprobs).clamp(-20, 20)
    return log_ratio.square() / 2


def in_place(logprobs, ref_logprobs, mask):
    mask[:, 1:] = False
    return k2(logprobs, ref_logprobs, mask)


def ends(logprobs, ref_logprobs):
    os._exit(0)


def chi_squared(logits, ref_logits, mask):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (p - q).square().div(q).sum(-1) / 2


def half_and_half(logits, ref_logits, completion_mask):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    per_token = (0.3 * p.exp() * (p - q) + 0.7 * q.exp() * (q - p)).sum(-1)
    return (per_token * completion_mask).sum() / completion_mask.sum()


def squared_jensen_shannon(logits, ref_logits, mask):
    return jensen_shannon(logits, ref_logits, mask).square()


def rewarded(logprobs, old_logprobs, r, mask):
    """REINFORCE with the importance weight of the whole completion, for rewards of it or of its tokens."""
    total = r if r.ndim == 1 else (r * mask).sum(-1)
    return -(torch.where(mask, logprobs - old_logprobs, 0).sum(-1).exp() * total).mean()


def teacher_head(student_logits, teacher_topk_ids, teacher_topk_log_probs, mask):
    """The forward KL over the teacher's most likely tokens."""
    log_p = student_logits.log_softmax(-1).gather(-1, teacher_topk_ids)
    return (teacher_topk_log_probs.exp() * (teacher_topk_log_probs - log_p)).sum(-1)
