"""Which known gradient the expected gradient of a loss is, by its values with several pairs of models."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators.enumerated_loss import (
    EXAMINED,
    KL_LEVELS,
    SIZES,
    EnumeratedModels,
    Expected,
    known_gradients,
)
from lit_klrb.functional.enumeration import exact_kl

# Relative: a loss that computes in float32 passes, one that computes in bfloat16 does not
TOLERANCE = 1e-4
# Of the sum of all contributions that cancel, below which an expected gradient is zero
CANCELLED = 1e-6
ZERO = "zero"
Batching = Literal["averaged", "summed", "tokens", "coupled", "none"]


class Level(NamedTuple):
    """The expected gradient of one pair of models, with its normalisation undone and divided by the scale."""

    tokens: int  # the number of its tokens, EOS included
    positions: int  # the largest number of tokens of a completion
    kl: float  # KL(policy || reference), in nats per sequence
    # Its cosine with each known gradient; None where the expected gradient is zero
    cosines: dict[str, float | None]
    norm_ratio: float  # its norm over that of the gradient of the KL
    bias: float  # norm of its difference to the gradient of the KL, over that gradient's


class GradientIdentity(NamedTuple):
    """What the expected gradient is."""

    name: str | None  # a name of `KNOWN`, `ZERO`, or None for another gradient
    # The factor before it, which may be negative. Without a name that of `unclamped`, or the sum of the
    # positive weights of `mixture`, or that of the KL's gradient that is nearest where the KL is small
    scale: float
    # "sum": over tokens, and a mean or sum over completions; "batch": divided by the tokens of the batch;
    # "length": each completion divided by its own tokens
    normalisation: str
    levels: tuple[Level, ...]  # one per pair of models
    small_batch: Level | None  # with the division by the batch's tokens, in batches of the smallest size
    # The pairs, as indices of `levels`, with which it has the gradient of `unclamped` or `mixture`
    agrees_at: tuple[int, ...] = ()
    unclamped: str | None = None  # the known gradient, or `ZERO`, that it has with some of the pairs only
    # Weights of the known gradients whose sum it is, for more than one of them
    mixture: dict[str, float] = {}  # noqa: RUF012


# Normalisations to try, and whether the loss is then multiplied by the number of tokens
VARIANTS: dict[Batching, tuple[tuple[str, bool], ...]] = {
    "averaged": (("sum", False), ("length", True)),
    "summed": (("sum", False), ("length", True)),
    "tokens": (("batch", True),),
    "coupled": (("sum", False), ("batch", True)),
    "none": (("sum", False), ("batch", True)),
}


def identify(
    models: Sequence[EnumeratedModels], expected: list[Expected], batching: Batching, over_width: bool = False
) -> GradientIdentity:
    """The first normalisation with which the gradient is a known one."""
    if over_width:  # one position is padding
        expected = [_times(e, m.policy.max_length + 1) for e, m in zip(expected, models, strict=True)]
    known = [known_gradients(*world) for world in models]
    for normalisation, by_tokens in VARIANTS[batching]:
        gradients = [part.by_tokens if by_tokens else part.plain for part in expected]
        if all(g.norm() <= CANCELLED * part.size for g, part in zip(gradients, expected, strict=True)):
            return _identity(ZERO, 1.0, normalisation, models, known, expected)._replace(scale=0.0)
        for name in known[0]:
            scale = _scale(gradients, [gradients_of[name] for gradients_of in known])
            if scale is not None:
                return _identity(name, scale, normalisation, models, known, expected)
    partly = [
        _partly(normalisation, by_tokens, models, known, expected)
        for normalisation, by_tokens in VARIANTS[batching]
    ]
    return max(partly, key=lambda identity: len(identity.agrees_at))


# What is clamped is so with the largest KLs, and what is left out is so with the most tokens
_SUBSETS = tuple(
    tuple(index for index, (tokens, _, kl) in enumerate(SIZES) if kl < limit and tokens < most)
    for limit in (math.inf, KL_LEVELS[-1] + 1, KL_LEVELS[-1] - 1)
    for most in (math.inf, 4)
)


def _times(expected: Expected, factor: float) -> Expected:
    plain, by_tokens, size, padding = expected
    return Expected(plain * factor, by_tokens * factor, size * factor, padding * factor)


def _partly(
    normalisation: str,
    by_tokens: bool,
    models: Sequence[EnumeratedModels],
    known: list[dict[str, Tensor]],
    expected: list[Expected],
) -> GradientIdentity:
    """The identity of a gradient that is a known one for some pairs only, a mixture of them, or neither."""
    gradients = [part.by_tokens if by_tokens else part.plain for part in expected]
    agreeing: dict[str, list[int]] = {name: [] for name in (*known[0], ZERO)}
    for name, indices in agreeing.items():
        for index, (gradient, part) in enumerate(zip(gradients, expected, strict=True)):
            tried = [*indices, index]  # with one common scale
            if name == ZERO:
                agrees = part.size > 0 and gradient.norm() <= CANCELLED * part.size
            else:
                targets = [known[i][name] for i in tried]
                agrees = _scale([gradients[i] for i in tried], targets) is not None
            indices += [index] if agrees else []
    unclamped = max(agreeing, key=lambda name: len(agreeing[name]))
    if indices := agreeing[unclamped]:
        scale = 1.0
        if unclamped != ZERO:
            scale = _projection([gradients[i] for i in indices], [known[i][unclamped] for i in indices])
        identity = _identity(None, scale, normalisation, models, known, expected)
        return identity._replace(agrees_at=tuple(indices), unclamped=unclamped)
    for kept in _SUBSETS:
        if mixture := _mixture([gradients[i] for i in kept], [known[i] for i in kept]):
            scale = sum(weight for weight in mixture.values() if weight > 0) or 1.0
            identity = _identity(None, scale, normalisation, models, known, expected)
            return identity._replace(agrees_at=kept, mixture=mixture)
    scale = abs(_projection(gradients[:1], [known[0]["kl"]])) or 1.0
    return _identity(None, scale, normalisation, models, known, expected)


def _mixture(gradients: list[Tensor], known: list[dict[str, Tensor]]) -> dict[str, float]:
    """Weights of the mixture of known gradients that equals this one for all pairs; empty if none does."""
    norms = [g.norm().item() for g in gradients]
    if not all(norms):
        return {}
    target = torch.cat([g.flatten() / n for g, n in zip(gradients, norms, strict=True)])
    columns = {
        name: torch.cat([k[name].flatten() / n for k, n in zip(known, norms, strict=True)])
        for name in known[0]
    }
    for _ in range(2):  # the second time without those whose part is rounding
        matrix = torch.stack(list(columns.values()), -1)
        lengths = matrix.norm(dim=0)
        weights = torch.linalg.lstsq(matrix / lengths, target[:, None]).solution[:, 0] / lengths
        shares = (weights.abs() * lengths / target.norm()).tolist()
        mixture = dict(zip(columns, weights.tolist(), strict=True))
        kept = {name: columns[name] for name, share in zip(mixture, shares, strict=True) if share > 1e-3}
        columns = kept or columns
    return mixture if (matrix @ weights - target).norm() <= TOLERANCE * target.norm() else {}


def _scale(gradients: list[Tensor], targets: list[Tensor]) -> float | None:
    """The common factor by which gradients are multiples of their targets; None if they are not."""
    scale = _projection(gradients, targets)
    pairs = zip(gradients, targets, strict=True)
    close = all((g - scale * t).norm() <= TOLERANCE * abs(scale) * t.norm() for g, t in pairs)
    return scale if scale and close else None


def _projection(gradients: list[Tensor], targets: list[Tensor]) -> float:
    """The mean over KLs of the factor that brings each target nearest to its gradient."""
    factors = [
        (g * t).sum().item() / t.square().sum().item() if t.any() else 1.0
        for g, t in zip(gradients, targets, strict=True)
    ]
    return sum(factors) / len(factors)


def _identity(
    name: str | None,
    scale: float,
    normalisation: str,
    models: Sequence[EnumeratedModels],
    known: list[dict[str, Tensor]],
    expected: list[Expected],
) -> GradientIdentity:
    """The identity with its levels; a division by the batch's tokens is undone in them."""
    plain, by_tokens = [part.plain for part in expected], [part.by_tokens for part in expected]
    zeros = [CANCELLED * part.size for part in expected]
    if normalisation == "sum":
        levels = tuple(map(_level, models, plain, known, [scale] * len(models), zeros))
        return GradientIdentity(name, scale, normalisation, levels, None)
    # Dividing by numbers of tokens shrinks it by about their mean, which is no bias
    shrunk = [scale * _projection([g], [undone]) for g, undone in zip(plain, by_tokens, strict=True)]
    divided = tuple(map(_level, models, plain, known, shrunk, zeros))
    if normalisation == "length":
        return GradientIdentity(name, scale, normalisation, divided, None)
    levels = tuple(map(_level, models, by_tokens, known, [scale] * len(models), zeros))
    return GradientIdentity(name, scale, normalisation, levels, divided[EXAMINED])


def _level(
    world: EnumeratedModels, gradient: Tensor, known: dict[str, Tensor], scale: float, zero: float
) -> Level:
    """The level of a gradient, which is rounding, without a direction, up to the norm `zero`."""
    norm, true = gradient.norm().item(), known["kl"]
    cosines = {
        name: (gradient * target).sum().item() / (norm * target.norm().item()) if norm > zero else None
        for name, target in known.items()
    }
    return Level(
        world.policy.logits.shape[1],
        world.policy.max_length,
        exact_kl(world.policy, world.reference).item(),
        cosines,
        norm / abs(scale) / true.norm().item(),
        ((gradient / abs(scale) - true).norm() / true.norm()).item(),
    )
