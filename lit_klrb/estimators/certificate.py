"""Which gradient a KL loss has: the mathematics of `python -m lit_klrb certify`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from lit_klrb.estimators.enumerated_loss import (
    EXAMINED,
    EnumeratedModels,
    Expected,
    Loss,
    LossError,
    expected_gradient,
    known_gradients,
    worlds,
)
from lit_klrb.functional.enumeration import exact_kl

# Relative: a loss that computes in float32 passes, one that computes in bfloat16 does not
TOLERANCE = 1e-4
# Of the sum of all contributions that cancel, below which an expected gradient is zero
CANCELLED = 1e-6
ZERO = "zero"
Batching = Literal["averaged", "summed", "tokens", "coupled", "none"]


class Level(NamedTuple):
    """The expected gradient of one pair of models."""

    tokens: int  # the number of its tokens, EOS included
    positions: int  # the largest number of tokens of a completion
    kl: float  # KL(policy || reference), in nats per sequence
    gradient: Tensor  # the expected gradient, shape [contexts, V]
    # Its cosine with each known gradient; None where the expected gradient is zero
    cosines: dict[str, float | None]
    norm_ratio: float  # its norm over that of the gradient of the KL
    # Norm of its difference to the gradient of the KL, after division by the scale, over that gradient's
    bias: float


class GradientIdentity(NamedTuple):
    """What the expected gradient is."""

    name: str | None  # a name of `KNOWN`, `ZERO`, or None for another gradient
    scale: float | None  # the factor before it, which may be negative; None without a name
    # "sum": over tokens, and a mean or sum over completions; "batch": divided by the tokens of the batch;
    # "length": each completion divided by its own tokens
    normalisation: str
    levels: tuple[Level, ...]  # one per pair of models
    # The pairs, as indices of `levels`, with which it has the gradient of `nearly`
    agrees_at: tuple[int, ...] = ()
    nearly: str | None = None  # the known gradient that it has with some of the pairs only


class Certificate(NamedTuple):
    """What is known about a loss."""

    on_policy: GradientIdentity  # the verdict for completions of the policy
    # The verdict for those of another policy, for a loss that reads its log-probabilities
    off_policy: GradientIdentity | None
    # The verdict for batches of one completion, for a loss that couples completions; None else
    alone: GradientIdentity | None
    alone_error: str | None  # why a single completion has no loss
    paired: bool  # whether batches of two completions were tried
    over_batch: bool  # whether completions of a batch are summed, not averaged
    padding: float  # relative change of the gradient with what lies outside the mask
    over_width: bool  # whether the loss is divided by the number of positions, padding included
    depends: bool  # whether the loss has any gradient in the policy


def certify(loss: Loss, *, takes_mask: bool = True, takes_old: bool = False) -> Certificate:
    """The certificate of a loss.

    All completions of pairs of small models are enumerated (`SIZES`); every prefix has parameters of its own.
    The expectation is over each completion alone. Pairs in batches of two show how completions are averaged;
    a loss that couples them, or has none for one completion, is judged on all pairs.

    Args:
        loss: A scalar of a batch.
        takes_mask: Whether the loss reads the mask. If not, single completions without padding are tried.
        takes_old: Whether it reads the log-probabilities of the policy that the completions are from.

    Raises:
        LossError: If it cannot be computed.
    """
    models = worlds(off_policy=False)
    alone_error, alone = None, None
    try:
        alone = [expected_gradient(loss, world, 1, takes_mask) for world in models]
    except LossError as error:
        if not takes_mask:
            raise
        alone_error = str(error)
    pair = expected_gradient(loss, models[EXAMINED], 2, takes_mask) if takes_mask else None
    batching = "none" if pair is None else _batching(alone[EXAMINED], pair) if alone else "coupled"
    size = 2 if batching == "coupled" else 1
    if alone and size == 1:
        judged = alone
    else:
        judged = [expected_gradient(loss, world, 2, takes_mask) for world in models]
    single = _verdict(models, alone, "none") if alone and size == 2 else None
    off_policy = None
    if takes_old:
        others = worlds(off_policy=True)
        parts = [expected_gradient(loss, world, size, takes_mask) for world in others]
        off_policy = _verdict(others, parts, batching)
    padding, over_width = (
        _padding(loss, models[EXAMINED], judged[EXAMINED], size) if takes_mask else (0.0, False)
    )
    return Certificate(
        _verdict(models, judged, batching),
        off_policy,
        single,
        alone_error,
        takes_mask,
        batching == "summed",
        padding,
        over_width,
        any(expected.size > 0 for expected in judged),
    )


def _batching(alone: Expected, pair: Expected) -> Batching:
    """How the loss of a pair follows from the losses of its completions, from expected gradients."""
    candidates: tuple[tuple[Batching, Tensor, Tensor], ...] = (
        ("averaged", pair.plain, alone.plain),
        ("summed", pair.plain, 2 * alone.plain),
        ("tokens", pair.by_tokens, alone.by_tokens),
    )
    for name, of_pair, of_one in candidates:
        if (of_pair - of_one).norm() <= max(TOLERANCE * of_one.norm().item(), CANCELLED * alone.size):
            return name
    return "coupled"


def _padding(loss: Loss, world: EnumeratedModels, first: Expected, size: int) -> tuple[float, bool]:
    """Relative change of the gradient with the padding, and whether the number of positions divides it."""
    if first.size == 0:
        return 0.0, False
    wider = expected_gradient(loss, world, size, takes_mask=True, padding=2)
    length = world.policy.max_length
    over_width = wider.plain * (length + 2) / (length + 1)
    scale = max(first.plain.norm().item(), CANCELLED * first.size)
    changes = [(other - first.plain).norm().item() / scale for other in (wider.plain, over_width)]
    outside = first.padding / first.size
    if changes[0] > TOLERANCE and changes[1] <= TOLERANCE:
        return outside, True
    return max(changes[0] if changes[0] > TOLERANCE else 0.0, outside), False


# Normalisations to try, and whether the loss is then multiplied by the number of tokens
VARIANTS: dict[Batching, tuple[tuple[str, bool], ...]] = {
    "averaged": (("sum", False), ("length", True)),
    "summed": (("sum", False), ("length", True)),
    "tokens": (("batch", True),),
    "coupled": (("sum", False), ("batch", True)),
    "none": (("sum", False), ("batch", True)),
}


def _verdict(
    models: Sequence[EnumeratedModels], expected: list[Expected], batching: Batching
) -> GradientIdentity:
    """The first normalisation with which the gradient is a known one."""
    known = [known_gradients(*world) for world in models]
    plain = [part.plain for part in expected]
    for normalisation, by_tokens in VARIANTS[batching]:
        gradients = [part.by_tokens if by_tokens else part.plain for part in expected]
        if all(g.norm() <= CANCELLED * part.size for g, part in zip(gradients, expected, strict=True)):
            return GradientIdentity(ZERO, 0.0, normalisation, _levels(models, plain, known, 1.0))
        for name in known[0]:
            targets = [gradients_of[name] for gradients_of in known]
            scale = _scale(gradients, targets)
            if scale is not None:
                levels = _levels(models, plain, known, _projection(plain, targets))
                return GradientIdentity(name, scale, normalisation, levels)
    levels = _levels(models, plain, known, 1.0)
    normalisation, by_tokens = VARIANTS[batching][0]
    gradients = [part.by_tokens if by_tokens else part.plain for part in expected]
    agreeing: dict[str, list[int]] = {name: [] for name in known[0]}
    for name, indices in agreeing.items():
        for index in range(len(models)):
            tried = [*indices, index]  # with one common scale
            if _scale([gradients[i] for i in tried], [known[i][name] for i in tried]) is not None:
                indices.append(index)
    nearly = max(agreeing, key=lambda name: len(agreeing[name]))
    directions = tuple(agreeing[nearly])
    return GradientIdentity(None, None, normalisation, levels, directions, nearly if directions else None)


def _scale(gradients: list[Tensor], targets: list[Tensor]) -> float | None:
    """The common factor by which gradients are multiples of their targets; None if they are not."""
    scale = _projection(gradients, targets)
    pairs = zip(gradients, targets, strict=True)
    close = all((g - scale * t).norm() <= TOLERANCE * abs(scale) * t.norm() for g, t in pairs)
    return scale if scale and close else None


def _projection(gradients: list[Tensor], targets: list[Tensor]) -> float:
    """The mean over KLs of the factor that brings each target nearest to its gradient."""
    factors = [
        (g * t).sum().item() / t.square().sum().item() for g, t in zip(gradients, targets, strict=True)
    ]
    return sum(factors) / len(factors)


def _levels(
    models: Sequence[EnumeratedModels],
    gradients: list[Tensor],
    known: list[dict[str, Tensor]],
    scale: float,
) -> tuple[Level, ...]:
    levels = []
    for world, gradient, targets in zip(models, gradients, known, strict=True):
        norm, true = gradient.norm().item(), targets["kl"]
        cosines = {
            name: (gradient * target).sum().item() / (norm * target.norm().item()) if norm > 1e-12 else None
            for name, target in targets.items()
        }
        levels.append(
            Level(
                world.policy.logits.shape[1],
                world.policy.max_length,
                exact_kl(world.policy, world.reference).item(),
                gradient,
                cosines,
                norm / true.norm().item(),
                ((gradient / scale - true).norm() / true.norm()).item(),
            )
        )
    return tuple(levels)
