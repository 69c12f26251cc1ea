import math

import pytest
import torch

from lit_klrb.functional.preference import preference_loss


def sigma(x):
    return 1 / (1 + math.exp(-x))


def slow(kind, c, r, beta, smoothing):
    m = c - r
    return {
        "sigmoid": -(1 - smoothing) * math.log(sigma(m)) - smoothing * math.log(sigma(-m)),
        "robust": (-(1 - smoothing) * math.log(sigma(m)) + smoothing * math.log(sigma(-m)))
        / (1 - 2 * smoothing),
        "ipo": ((m / beta) - 1 / (2 * beta)) ** 2,
        "hinge": max(0.0, 1 - m),
        "apo_zero": (1 - sigma(c)) + sigma(r),
        "apo_down": sigma(c) + (1 - sigma(m)),
    }[kind]


CASES = [
    *((kind, 0.0) for kind in ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down")),
    ("sigmoid", 0.2),
    ("robust", 0.2),
]


@pytest.mark.parametrize(("kind", "smoothing"), CASES)
def test_a_loss_is_its_definition_and_so_is_its_gradient(kind, smoothing):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (
        torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    beta = 0.3

    def mean(c, r):
        return sum(slow(kind, beta * x, beta * y, beta, smoothing) for x, y in zip(c, r, strict=True)) / 6

    loss, stats = preference_loss(chosen, rejected, beta=beta, kind=kind, label_smoothing=smoothing)
    values = [chosen.tolist(), rejected.tolist()]
    assert loss.item() == pytest.approx(mean(*values), abs=1e-12)
    gradients = torch.autograd.grad(loss, (chosen, rejected), allow_unused=True)
    for side, gradient in enumerate(gradients):
        for row in range(6):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [list(side_values) for side_values in values]
                moved[side][row] += step
                ends.append(mean(*moved))
            expected = (ends[0] - ends[1]) / 2e-6
            assert gradient[row].item() == pytest.approx(expected, abs=1e-7)
    assert stats.accuracy.item() == pytest.approx((chosen > rejected).double().mean().item(), abs=1e-6)
    assert stats.margin.item() == pytest.approx(beta * (chosen - rejected).mean().item(), abs=1e-6)
    assert not stats.margin.requires_grad


def test_the_robust_loss_is_unbiased_for_clean_preferences():
    chosen, rejected, flipped = torch.tensor([0.4]), torch.tensor([-0.9]), 0.3
    clean, _ = preference_loss(chosen, rejected, beta=1.0)
    as_is, _ = preference_loss(chosen, rejected, beta=1.0, kind="robust", label_smoothing=flipped)
    swapped, _ = preference_loss(rejected, chosen, beta=1.0, kind="robust", label_smoothing=flipped)
    assert ((1 - flipped) * as_is + flipped * swapped).item() == pytest.approx(clean.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta: must be positive and finite, got 0"),
        ({"kind": "kto"}, "loss: must be one of sigmoid, .*, got 'kto'"),
        ({"label_smoothing": 0.5}, "label_smoothing: must be at least 0 and below 0.5, got 0.5"),
        ({"label_smoothing": 0.1, "kind": "hinge"}, "label_smoothing: must be 0 with hinge, got 0.1"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        preference_loss(torch.zeros(1), torch.zeros(1), **{"beta": 1.0, **settings})
