"""How much a loss's gradient spreads between batches of completions."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lit_klrb.estimators.enumerated_loss import EXAMINED, Loss, padded, worlds
from lit_klrb.functional.enumeration import exact_kl_gradient

# Batches per size: fewer of the large ones, whose means are good enough
REPETITIONS = {16: 100, 256: 40}


class Batches(NamedTuple):
    """Gradients of random batches."""

    spread: list[float | None]  # per batch size; None where the expected gradient is zero
    cosine: float | None  # of the mean over the largest batches with the gradient of the KL


def spread(loss: Loss, repetitions: Mapping[int, int] = REPETITIONS) -> Batches:
    """The standard deviation of a batch's gradient over the length of the expected gradient, per batch size.

    The gradients are those of the logits of every prefix, with the pair of models `EXAMINED` (a KL of 0.3);
    completions are drawn from the policy and are of one prompt.
    """
    world = worlds(off_policy=False)[EXAMINED]
    tokens, mask = world.policy.sequences()
    chances = world.policy.logprobs(tokens, mask).exp().detach()
    inputs, kept = padded(world, padding=1)
    contexts = world.policy.prefixes(tokens)[mask] % len(world.policy.logits)
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> torch.Tensor:
        rows = torch.multinomial(chances, size, replacement=True, generator=generator)
        value = loss(type(inputs)(*(field[rows] for field in inputs)))
        if not value.requires_grad:
            return torch.zeros_like(world.policy.logits)
        (gradient,) = torch.autograd.grad(value, inputs.logits)
        return torch.zeros_like(world.policy.logits).index_add(0, contexts, gradient[kept])

    gradients = {size: torch.stack([draw(size) for _ in range(n)]) for size, n in repetitions.items()}
    means = {size: g.mean(0) for size, g in gradients.items()}
    deviations = {size: (g - means[size]).square().sum((1, 2)).mean().sqrt() for size, g in gradients.items()}
    most = max(repetitions)
    largest = means[most]
    # A mean of so many batches is this long by chance
    if largest.norm() <= 3 * deviations[most] / repetitions[most] ** 0.5:
        return Batches([None] * len(repetitions), None)
    # The length along the direction of the largest batches, as a sum over the batch grows with it
    lengths = {size: (mean * largest).sum() / largest.norm() for size, mean in means.items()}
    true = exact_kl_gradient(world.policy, world.reference)
    cosine = (largest * true).sum() / (largest.norm() * true.norm())
    return Batches(
        [round((deviations[size] / lengths[size]).item(), 4) for size in means], round(cosine.item(), 3)
    )
