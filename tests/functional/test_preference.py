import math

import pytest
import torch

from lit_klrb.functional.preference import preference_loss


def test_the_loss_is_its_definition_and_so_is_its_gradient():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (
        torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    beta = 0.3

    def mean(c, r):
        return sum(math.log1p(math.exp(-beta * (x - y))) for x, y in zip(c, r, strict=True)) / 6

    loss, stats = preference_loss(chosen, rejected, beta=beta)
    values = [chosen.tolist(), rejected.tolist()]
    assert loss.item() == pytest.approx(mean(*values), abs=1e-12)
    for side, gradient in enumerate(torch.autograd.grad(loss, (chosen, rejected))):
        for row in range(6):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [list(side_values) for side_values in values]
                moved[side][row] += step
                ends.append(mean(*moved))
            assert gradient[row].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)
    assert stats.accuracy.item() == pytest.approx((chosen > rejected).double().mean().item(), abs=1e-6)
    assert stats.margin.item() == pytest.approx(beta * (chosen - rejected).mean().item(), abs=1e-6)
    assert not stats.margin.requires_grad
