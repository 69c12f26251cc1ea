"""Later inner steps without a correction or with clipping, which are biased, against plain loops."""

import math

import pytest
import torch
from definitions import DEFINITIONS, score_weights
from enumerated import Case

from lit_klrb import estimators
from lit_klrb.estimators import ReleasedMonteCarlo, ReleasedRaoBlackwell

BETA, GROUP_SIZE, CLIP_RANGE = 0.4, 2, (0.2, 0.3)
LOW, HIGH = 1 - CLIP_RANGE[0], 1 + CLIP_RANGE[1]
CASE = Case.random(contexts=2, vocab_size=3, max_length=4, seed=4)
ROWS = torch.tensor([0, 5, 20, 11, 3, 29])


def rows_of(stats):
    return stats.map(lambda field: field[ROWS])


def plain_loss(name, logits, off_policy):
    """Score weights and rewards of the rollout, clipped or not, and the current pathwise term."""
    mask, rewards = CASE.sequences[1][ROWS], CASE.rewards[ROWS]
    old, new = rows_of(CASE.stats(CASE.behaviour.logits)), rows_of(CASE.stats(logits))
    log_ratio = old.logprobs - old.ref_logprobs
    weights = BETA * score_weights(name, log_ratio, old.kl, mask, GROUP_SIZE, "leave_one_out")
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(mask.sum(1).tolist()):
        other = row + 1 if row % GROUP_SIZE == 0 else row - 1
        for t in range(length):
            weight = weights[row, t] - (rewards[row] - rewards[other])
            if off_policy == "none":
                total = total + weight * new.logprobs[row, t]
            else:
                ratio = (new.logprobs[row, t] - old.logprobs[row, t]).exp()
                total = total + torch.maximum(weight * ratio, weight * ratio.clamp(LOW, HIGH))
        r = (new.logprobs - new.ref_logprobs)[row, :length]
        total = total + BETA * DEFINITIONS[name].pathwise(r, new.kl[row, :length])
    return total / len(ROWS)


def loss_of(estimator, logits):
    mask = CASE.sequences[1][ROWS]
    old = rows_of(CASE.stats(CASE.behaviour.logits))
    weights = estimator.weights(old, mask, CASE.rewards[ROWS], beta=BETA, group_size=GROUP_SIZE)
    new = rows_of(CASE.stats(logits))
    return estimator.loss(new, mask, weights, beta=BETA, behaviour_logprobs=old.logprobs)


@pytest.mark.parametrize(
    ("name", "off_policy"),
    [
        (name, off_policy)
        for name in DEFINITIONS
        for off_policy in ("none", "clip")
        if not (name.startswith("Released") and off_policy == "clip")
    ],
)
def test_uncorrected_and_clipped_steps_equal_a_plain_loop(name, off_policy):
    leaf = CASE.policy.logits.clone().requires_grad_()
    estimator = getattr(estimators, name)(off_policy=off_policy, clip_range=CLIP_RANGE)
    loss, slow = loss_of(estimator, leaf), plain_loss(name, leaf, off_policy)
    gradients = [torch.autograd.grad(value, leaf)[0] for value in (loss, slow)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12
    assert gradients[1].norm() > 0.01


@pytest.mark.parametrize("kind", [ReleasedMonteCarlo, ReleasedRaoBlackwell])
def test_released_estimators_clip_whole_sequences_and_differentiate_the_kl(kind):
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
        total = total + torch.maximum(cost * ratio, cost * ratio.clamp(LOW, HIGH))
    loss = loss_of(kind(off_policy="clip", clip_range=CLIP_RANGE), leaf)
    assert loss.item() == pytest.approx((total / len(ROWS)).item(), abs=1e-12)
    gradients = [torch.autograd.grad(value, leaf)[0] for value in (loss, total / len(ROWS))]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12
    assert math.isfinite(gradients[0].norm())
