"""How much a loss's gradient spreads between batches of completions."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators.enumerated_loss import EXAMINED, Loss, LossError, LossInputs, padded, worlds
from lit_klrb.estimators.identity import TOLERANCE
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

    def gradient_of(rows: Tensor) -> Tensor:
        batch = LossInputs(*(field[rows] for field in inputs))
        leaf = batch.logits.requires_grad_()
        value = loss(batch)
        if not value.requires_grad:
            return torch.zeros_like(world.policy.logits)
        (of_batch,) = torch.autograd.grad(value, leaf)
        gradient = torch.zeros_like(inputs.logits).index_add(0, rows, of_batch)
        return torch.zeros_like(world.policy.logits).index_add(0, contexts, gradient[kept])

    generator = torch.Generator().manual_seed(0)
    batches = {
        size: [torch.multinomial(chances, size, replacement=True, generator=generator) for _ in range(n)]
        for size, n in repetitions.items()
    }
    tried = [rows for some in batches.values() for rows in some[:2]]
    quick = _of_single_ones(gradient_of, mask.sum(-1), tried)
    gradients = {size: torch.stack([*map(quick, some)]) for size, some in batches.items()}
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


def _of_single_ones(
    gradient_of: Callable[[Tensor], Tensor], lengths: Tensor, tried: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """The gradient of a batch: a mean or sum of those of its completions, if that of the tried batches is.

    Some software loops over the rows of a batch, most of which are the same few completions.
    """
    try:
        single = torch.stack([gradient_of(row[None]) for row in torch.arange(len(lengths))])
    except LossError:  # it needs several
        return gradient_of
    expected = [gradient_of(rows) for rows in tried]
    for weights in (lambda n: torch.ones_like(n) / len(n), torch.ones_like, lambda n: n / n.sum()):

        def combined(rows: Tensor, weights: Callable[[Tensor], Tensor] = weights) -> Tensor:
            return torch.einsum("n,n...->...", weights(lengths[rows].double()), single[rows])

        pairs = [(combined(rows), gradient) for rows, gradient in zip(tried, expected, strict=True)]
        if all((mean - gradient).norm() <= TOLERANCE * gradient.norm() for mean, gradient in pairs):
            return combined
    return gradient_of
