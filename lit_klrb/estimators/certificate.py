"""Which gradient a KL loss has: the mathematics of `lit-klrb certify`."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from lit_klrb.estimators.base import KLEstimator
from lit_klrb.estimators.enumerated_loss import (
    EXAMINED,
    EnumeratedModels,
    Expected,
    Loss,
    LossError,
    LossInputs,
    expected_gradient,
    worlds,
)
from lit_klrb.estimators.identity import CANCELLED, TOLERANCE, Batching, GradientIdentity, identify
from lit_klrb.functional.logprobs import token_stats


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


class EstimatorCertificate(NamedTuple):
    """What is known about an estimator without a baseline, for completions of the policy."""

    gradient: GradientIdentity
    mean_values: tuple[float, ...]  # of `KLEstimator.value` with each pair of models, in nats


# Of the three or six tokens, for estimators that read only the most likely ones
TOP_K = 1


def certify_estimator(estimator: KLEstimator) -> EstimatorCertificate:
    """The certificate of `KLEstimator.surrogate` for single completions without a baseline."""
    single = replace(estimator, baseline=None, allow_biased=True)  # studied, not trained with
    topk = single.topk and single.topk._replace(k=TOP_K)

    def loss(inputs: LossInputs) -> Tensor:
        stats = token_stats(
            inputs.logits, inputs.ref_logits, inputs.tokens, topk=topk, jsd_weight=estimator.reads_jsd
        )
        return single.surrogate(stats, inputs.mask)

    models = worlds(off_policy=False)
    values = []
    for world in models:
        tokens, mask = world.policy.sequences()
        logits = world.policy.token_logits(tokens)
        stats = token_stats(
            logits, world.reference.token_logits(tokens), tokens, topk=topk, jsd_weight=estimator.reads_jsd
        )
        values.append((world.policy.logprobs(tokens, mask).exp() @ single.value(stats, mask)).item())
    expected = [expected_gradient(loss, world, 1, takes_mask=True) for world in models]
    return EstimatorCertificate(identify(models, expected, "averaged"), tuple(values))


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
    single = identify(models, alone, "none") if alone and size == 2 else None
    padding, over_width = (
        _padding(loss, models[EXAMINED], judged[EXAMINED], size) if takes_mask else (0.0, False)
    )
    off_policy = None
    if takes_old:
        others = worlds(off_policy=True)
        parts = [expected_gradient(loss, world, size, takes_mask) for world in others]
        off_policy = identify(others, parts, batching, over_width)
    return Certificate(
        identify(models, judged, batching, over_width),
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
