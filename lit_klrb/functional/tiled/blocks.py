"""What happens to one block of logits [N, block] of the policy and one of the reference.

Passes over the logits are all that Rao-Blackwellisation costs over Monte Carlo: they are few and in place, so
that all arguments [N, block] are overwritten, and `fused` makes one or two of them.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")


def fused(body: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """The body as torch.compile fuses it, on a GPU or where the environment says `LIT_KLRB_COMPILE=1`.

    On a CPU that takes a C++ compiler, and some ten seconds once, for a few per cent of the operation's time:
    by default it runs as it is written.
    """
    setting = os.environ.get("LIT_KLRB_COMPILE", "auto")
    if setting not in ("0", "1", "auto"):
        raise ConfigurationError(f"LIT_KLRB_COMPILE is {setting!r}; 0, 1 or auto expected")
    wanted = setting == "1" or (setting == "auto" and device.type == "cuda")
    return _compiled(body) if wanted else body


@functools.cache
def _compiled(body: Callable[P, T]) -> Callable[P, T]:
    return torch.compile(body, dynamic=True)


def block_sums(logits: Tensor, ref_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the normalisers, the KL and the entropy of its rows.

    Returns:
        With v and w the logits of policy and reference minus their largest in the block: these largest, and
        the sums of exp(v), exp(w), exp(v) (v - w) and exp(v) v, together [6, N]; exp(v) and w - v, both
        [N, block].
    """
    logits, ref_logits = _overwritable(logits, ref_logits)
    lowest = torch.finfo(logits.dtype).min  # for the top of a block that a model excludes altogether
    top = logits.amax(1, keepdim=True).clamp_(min=lowest)
    ref_top = ref_logits.amax(1, keepdim=True).clamp_(min=lowest)
    ref_mass = ref_logits.sub_(ref_top).exp().sum(1)
    centred = logits - top
    _exponentiate(logits, centred, ref_logits)
    cross = -(logits * ref_logits).sum(1)
    spread = centred.mul_(logits).sum(1)
    sums = torch.stack([top[:, 0], ref_top[:, 0], logits.sum(1), ref_mass, cross, spread])
    return sums, logits, ref_logits


def block_gradient(masses: Tensor, differences: Tensor, coefficients: Tensor) -> Tensor:
    """The gradient exp(v) (a + b (w - v)).

    Args:
        masses: exp(v), [N, block].
        differences: w - v, [N, block].
        coefficients: a and b, [2, N].
    """
    (differences,) = _overwritable(differences)
    constant, slope = coefficients.unsqueeze(-1)
    return differences.mul_(slope).add_(constant).mul_(masses)


def block_recomputed_gradient(
    logits: Tensor, ref_logits: Tensor, normalisers: Tensor, coefficients: Tensor
) -> Tensor:
    """The gradient p (a + b (log q - log p) + c log p), p and q the softmaxes.

    Args:
        logits: Policy, [N, block].
        ref_logits: Reference, [N, block].
        normalisers: Of policy and reference, [2, N].
        coefficients: a, b and c, [3, N].
    """
    logits, ref_logits = _overwritable(logits, ref_logits)
    normaliser, ref_normaliser = normalisers.unsqueeze(-1)
    constant, slope, surprise = coefficients.unsqueeze(-1)
    logprobs = logits - normaliser
    _exponentiate(logits, logprobs, ref_logits.sub_(ref_normaliser))
    finite_(ref_logits).mul_(slope).addcmul_(logprobs, surprise)
    return ref_logits.add_(constant).mul_(logits)


def finite_(differences: Tensor) -> Tensor:
    """Infinite differences made large, in place: where the KL has no weight they then count for nothing."""
    return differences.clamp_(min=torch.finfo(differences.dtype).min)


def _overwritable(*blocks: Tensor) -> tuple[Tensor, ...]:
    """The blocks themselves; for the compiler copies, which it never makes: it only writes results anew."""
    return tuple(block.clone() for block in blocks) if torch.compiler.is_compiling() else blocks


def _exponentiate(masses: Tensor, centred: Tensor, ref_centred: Tensor) -> None:
    """Set masses = exp(centred) and ref_centred = ref_centred - centred.

    Tokens without mass get 0 for these and for `centred`. That starts where float32 (or the type at hand)
    loses precision: subnormal numbers make matrix products thirty times slower.
    """
    ref_centred.sub_(centred)
    floor = math.log(torch.finfo(centred.dtype).tiny)
    if torch.compiler.is_compiling() or not bool((centred.amin(1) > floor).all()):
        absent = ~(centred > floor)
        torch.exp(centred, out=masses).masked_fill_(absent, 0)
        ref_centred.masked_fill_(absent, 0)
        centred.masked_fill_(absent, 0)
    else:
        torch.exp(centred, out=masses)


class RowStats(NamedTuple):
    """Statistics of each row over the whole vocabulary, in float64, [N].

    There the normalisers, large numbers of which a small KL is the difference, are precise enough.
    """

    normaliser: Tensor
    ref_normaliser: Tensor
    kl: Tensor
    entropy: Tensor

    @staticmethod
    def of(sums: Tensor) -> "RowStats":
        """Combine what `block_sums` returned for every block, stacked, [blocks, 6, N]."""
        top, ref_top, mass, ref_mass, cross, spread = sums.double().unbind(1)
        normaliser = (top + mass.log()).logsumexp(0)
        ref_normaliser = (ref_top + ref_mass.log()).logsumexp(0)
        share = (top - normaliser).exp()
        log_ratio = (share * (mass * (top - ref_top) + cross)).sum(0)
        kl = log_ratio - (normaliser - ref_normaliser)
        entropy = normaliser - (share * (mass * top + spread)).sum(0)
        return RowStats(normaliser, ref_normaliser, kl.clamp_(min=0), entropy.clamp_(min=0))
