"""Later inner steps without a correction, and with clipping: biased, so held to a slow plain version."""

import math

import pytest
import torch
from enumerated import Case

from lit_klrb.estimators import MonteCarlo, RaoBlackwell, ReleasedMonteCarlo, ReleasedRaoBlackwell
from lit_klrb.functional import TokenStats

BETA, GROUP_SIZE, CLIP_RANGE = 0.4, 2, 0.2
CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=4)
ROWS = torch.tensor([0, 5, 20, 11, 3, 29])


def rows_of(stats):
    return TokenStats(*(field[ROWS] for field in stats))


def plain_score_weights(value, strict):
    """-reward + beta times the KL to come, less the other completion's; `value` [B, T] is 0 after EOS."""
    size, length = value.shape
    to_go = torch.zeros(size, length, dtype=torch.float64)
    for row in range(size):
        for t in range(length):
            later = range(t + 1, length) if strict else range(length)
            to_go[row, t] = sum(value[row, s].item() for s in later)
    weights = torch.zeros_like(to_go)
    rewards = CASE.rewards[ROWS]
    for row in range(size):
        other = row + 1 if row % GROUP_SIZE == 0 else row - 1
        for t in range(length):
            weights[row, t] = BETA * (to_go[row, t] - to_go[other, t]) - (rewards[row] - rewards[other])
    return weights


def plain_loss(kind, logits, off_policy):
    mask = CASE.sequences[1][ROWS]
    old, new = rows_of(CASE.stats(CASE.behaviour.logits)), rows_of(CASE.stats(logits))
    log_ratio = torch.where(mask, old.logprobs - old.ref_logprobs, 0)
    kl = torch.where(mask, old.kl, 0)
    weights = (
        plain_score_weights(log_ratio, strict=False)
        if kind is MonteCarlo
        else plain_score_weights(kl, strict=True)
    )
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(ROWS)):
        for t in range(mask.shape[1]):
            if not mask[row, t]:
                continue
            weight = weights[row, t]
            ratio = (new.logprobs[row, t] - old.logprobs[row, t]).exp()
            if off_policy == "none":
                total = total + weight * new.logprobs[row, t]
            else:
                low, high = 1 - CLIP_RANGE, 1 + CLIP_RANGE
                total = total + torch.maximum(weight * ratio, weight * ratio.clamp(low, high))
            if kind is RaoBlackwell:
                total = total + BETA * new.kl[row, t]
    return total / len(ROWS)


def loss_of(estimator, logits):
    mask = CASE.sequences[1][ROWS]
    old = rows_of(CASE.stats(CASE.behaviour.logits))
    weights = estimator.weights(old, mask, CASE.rewards[ROWS], beta=BETA, group_size=GROUP_SIZE)
    new = rows_of(CASE.stats(logits))
    return estimator.loss(new, mask, weights, beta=BETA, behaviour_logprobs=old.logprobs)


@pytest.mark.parametrize("off_policy", ["none", "clip"])
@pytest.mark.parametrize("kind", [MonteCarlo, RaoBlackwell])
def test_uncorrected_and_clipped_steps_equal_a_plain_loop(kind, off_policy):
    leaf = CASE.policy.logits.clone().requires_grad_()
    estimator = kind(off_policy=off_policy, clip_range=CLIP_RANGE)
    loss, slow = loss_of(estimator, leaf), plain_loss(kind, leaf, off_policy)
    gradients = [torch.autograd.grad(value, leaf)[0] for value in (loss, slow)]
    assert loss.item() == pytest.approx(slow.item(), abs=1e-12)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12
    assert gradients[1].norm() > 0.01


def test_clipping_changes_the_gradient():
    leaf = CASE.policy.logits.clone().requires_grad_()
    narrow, wide = (
        torch.autograd.grad(loss_of(MonteCarlo(off_policy="clip", clip_range=width), leaf), leaf)[0]
        for width in (0.01, 10.0)
    )
    assert (narrow - wide).norm() > 1e-3


@pytest.mark.parametrize("kind", [ReleasedMonteCarlo, ReleasedRaoBlackwell])
def test_the_released_clipping_is_that_of_whole_sequences_with_a_live_kl(kind):
    leaf = CASE.policy.logits.clone().requires_grad_()
    mask = CASE.sequences[1][ROWS]
    old, new = rows_of(CASE.stats(CASE.behaviour.logits)), rows_of(CASE.stats(leaf))

    def kl_of(stats):
        value = stats.logprobs - stats.ref_logprobs if kind is ReleasedMonteCarlo else stats.kl
        return torch.where(mask, value, 0).sum(-1)

    rewards, stale, live = CASE.rewards[ROWS], kl_of(old).detach(), kl_of(new)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(ROWS)):
        other = row + 1 if row % GROUP_SIZE == 0 else row - 1
        baseline = rewards[other] - BETA * stale[other]
        cost = BETA * live[row] - rewards[row] + baseline
        ratio = torch.where(mask[row], new.logprobs[row] - old.logprobs[row], 0).sum().exp()
        total = total + torch.maximum(cost * ratio, cost * ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE))
    loss = loss_of(kind(off_policy="clip", clip_range=CLIP_RANGE), leaf)
    assert loss.item() == pytest.approx((total / len(ROWS)).item(), abs=1e-12)
    gradients = [torch.autograd.grad(value, leaf)[0] for value in (loss, total / len(ROWS))]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12
    assert math.isfinite(gradients[0].norm())
