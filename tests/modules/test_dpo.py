import math

import pytest
import torch

from lit_klrb.functional.preference import dpo_loss
from lit_klrb.generation import Rollout
from lit_klrb.modules.dpo import best_and_worst


def test_the_loss_is_the_negative_log_likelihood_of_the_preferences():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    chosen.requires_grad_()
    loss, stats = dpo_loss(chosen, rejected, beta=0.3)
    slow = [
        -math.log(1 / (1 + math.exp(-0.3 * (c - r))))
        for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    assert loss.item() == pytest.approx(sum(slow) / 5, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, chosen)
    for row in range(5):
        margin = 0.3 * (chosen[row] - rejected[row]).item()
        assert gradient[row].item() == pytest.approx(-0.3 / (1 + math.exp(margin)) / 5, abs=1e-12)
    assert stats.accuracy.item() == pytest.approx((chosen > rejected).double().mean().item(), abs=1e-6)
    assert not stats.margin.requires_grad


def test_beta_must_be_positive():
    with pytest.raises(ValueError, match="beta must be positive, got 0"):
        dpo_loss(torch.zeros(1), torch.zeros(1), beta=0.0)


def test_pairs_are_the_best_against_the_worst_and_ties_give_none():
    tokens = torch.tensor(
        [[9, 1, 5, 0], [9, 1, 6, 7], [9, 1, 0, 0], [8, 2, 3, 0], [8, 2, 4, 0], [8, 2, 3, 4]]
    )
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]).bool()
    rollout = Rollout(tokens, torch.cat([torch.ones(6, 2).bool(), mask], 1), mask)
    pairs = best_and_worst(
        [[9, 1], [8, 2]], rollout, torch.tensor([0.5, 2.0, -1.0, 3.0, 3.0, 3.0]), torch.arange(6.0)
    )
    assert pairs == [([9, 1], [6, 7], [0], 1.0, 2.0)]
