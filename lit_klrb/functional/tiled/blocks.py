"""Elementwise operations and reductions on one block of logits [N, block] of policy and reference.

Passes over the logits are the only cost of Rao-Blackwellisation over Monte Carlo. There are few of them, and
they work in place; see `fused`.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.credit import weighted
from lit_klrb.functional.sums import probabilities_of

P = ParamSpec("P")
Sums = TypeVar("Sums", Tensor, None)

# Environment variable: whether the body is compiled.
COMPILE = "LIT_KLRB_COMPILE"
# Elements per pass on a CPU (4 MB of each block): more do not fit into the cache, and with fewer the cost of
# starting a pass on every core dominates.
_ELEMENTS_PER_PASS = 2**20


def fused(body: Callable[P, Sums], device: torch.device) -> Callable[P, Sums]:
    """The body compiled by torch.compile, on a GPU or with `LIT_KLRB_COMPILE=1` in the environment.

    On a CPU, compilation needs a C++ compiler and takes half a minute the first time and a few seconds in
    every process, and saves a few per cent of the operation's time. By default the body therefore runs
    eagerly there, on a few rows at a time, which stay in the cache.

    Raises:
        ConfigurationError: If `LIT_KLRB_COMPILE` is not 0, 1 or auto.
    """
    setting = os.environ.get(COMPILE, "auto")
    if setting not in ("0", "1", "auto"):
        raise ConfigurationError(f"must be 0, 1 or auto, got {setting!r}", key=COMPILE)
    compile_body = setting == "1" or (setting == "auto" and device.type == "cuda")
    return _compiled(body) if compile_body else functools.partial(_by_rows, body)


@functools.cache
def _compiled(body: Callable[P, Sums]) -> Callable[P, Sums]:
    return torch.compile(body, dynamic=True)


def _by_rows(body: Callable[..., Any], *blocks: Tensor) -> Any:
    """Apply the body to as many rows at a time as fit into the cache, and concatenate the results."""
    rows = max(1, _ELEMENTS_PER_PASS // max(1, blocks[0].shape[1]))
    parts = [body(*part) for part in zip(*(torch.split(block, rows) for block in blocks), strict=True)]
    return None if parts[0] is None else torch.cat(parts)


def block_sums(logits: Tensor, ref_logits: Tensor, masses: Tensor) -> Tensor:
    """One block's contribution to the normalisers, the KL and the entropy of its rows.

    v and w denote the logits of policy and reference minus the row's maximum within the block.

    Args:
        logits: Policy logits, shape [N, block]; used as scratch space.
        ref_logits: Reference logits, shape [N, block]; overwritten with exp(v) (w - v).
        masses: Output, shape [N, block]; overwritten with exp(v).

    Returns:
        The maxima of policy and reference, and the sums of exp(v), exp(w), exp(v) (w - v), exp(v) v and
        exp(w) (w - v), shape [N, 7].
    """
    logits = scratch(logits)
    # A model may exclude all tokens of a block: a maximum of -inf would give -inf - -inf = NaN
    lowest = torch.finfo(logits.dtype).min
    top = logits.amax(1, keepdim=True).clamp_(min=lowest)
    ref_top = ref_logits.amax(1, keepdim=True).clamp_(min=lowest)
    # `masses` holds exp(w) only until it is summed, and then exp(v): no memory of its own
    ref_mass = torch.exp(ref_logits.sub_(ref_top), out=masses).sum(1)
    lowest_v = logits.sub_(top).amin(1)
    ref_logits.sub_(logits)  # from here on w - v
    # The passes for excluded tokens are skipped if there are none, which the compiler cannot branch on
    every_pass = torch.compiler.is_compiling()
    largest = ref_largest = torch.zeros_like(ref_mass)
    if every_pass or bool((lowest_v == -torch.inf).any()):
        excluded = logits == -torch.inf
        ref_largest = torch.where(excluded, masses, 0).amax(1)
        ref_logits.masked_fill_(excluded, 0)
    forward = masses.mul_(ref_logits).sum(1)
    if every_pass or bool(forward.isnan().any()):
        forward = masses.nansum(1)  # a token that the reference excludes contributes 0, not 0 * -inf = NaN
    _exponentiate(logits, ref_logits, masses, lowest_v)
    mass, cross, spread = masses.sum(1), ref_logits.mul_(masses).sum(1), logits.mul_(masses).sum(1)
    if every_pass or bool((cross == -torch.inf).any()):
        excluded = ref_logits == -torch.inf
        largest = torch.where(excluded, masses, 0).amax(1)
        cross = ref_logits.masked_fill_(excluded, 0).sum(1)
    tops = top[:, 0], ref_top[:, 0]
    return torch.stack([*tops, mass, ref_mass, cross, spread, forward, largest, ref_largest], 1)


def block_gradient(
    products: Tensor, masses: Tensor, coefficients: Tensor, values: Tensor | None = None
) -> None:
    """Overwrite the products exp(v) (w - v) with the gradient exp(v) (a + b (w - v) + c x).

    Args:
        products: exp(v) (w - v), shape [N, block].
        masses: exp(v), shape [N, block].
        coefficients: a and b, and c with token values, shape [N, 2] or [N, 3].
        values: Token values x, shape [N, block]; None without them.
    """
    constant, slope, *by_value = coefficients.unsqueeze(-1).unbind(1)
    if values is not None:
        constant = torch.addcmul(constant, by_value[0], values)
    products.mul_(slope).addcmul_(masses, constant)


def block_recomputed_gradient(
    logits: Tensor,
    ref_logits: Tensor,
    masses: Tensor,
    normalisers: Tensor,
    coefficients: Tensor,
    values: Tensor | None = None,
) -> None:
    """Overwrite the reference's logits with the gradient p (a + b (log q - log p) + c log p + e x) + d q.

    p and q denote the softmax of policy and reference over the whole vocabulary.

    Args:
        logits: Policy logits, shape [N, block]; used as scratch space.
        ref_logits: Reference logits, shape [N, block]; overwritten with the gradient.
        masses: Output, shape [N, block]; overwritten with p.
        normalisers: Log normalisers of policy and reference, shape [N, 2].
        coefficients: a, b, c and d, and e with token values, shape [N, 4] or [N, 5].
        values: Token values x, shape [N, block]; None without them.
    """
    logits = scratch(logits)
    normaliser, ref_normaliser = normalisers.unsqueeze(-1).unbind(1)
    constant, slope, by_logprob, by_reference, *by_value = coefficients.unsqueeze(-1).unbind(1)
    if values is not None:
        constant = torch.addcmul(constant, by_value[0], values)
    ref_logits.sub_(ref_normaliser)
    ref_masses = None
    if torch.compiler.is_compiling() or bool((by_reference != 0).any()):
        ref_masses = ref_logits.exp()
        ref_masses.masked_fill_(ref_masses < torch.finfo(ref_masses.dtype).tiny, 0).mul_(by_reference)
    # logits -> log p and ref_logits -> log q - log p; then p (a + b (log q - log p) + c log p + e x)
    ref_logits.sub_(logits.sub_(normaliser))
    _exponentiate(logits, ref_logits, masses, logits.amin(1))
    finite_(ref_logits).mul_(slope).addcmul_(logits, by_logprob)
    ref_logits.add_(constant).mul_(masses)
    if ref_masses is not None:
        ref_logits.add_(ref_masses)


def block_masses(logits: Tensor) -> Tensor:
    """One block's contribution to the normalisers of its rows, from logits of one model, shape [N, block].

    Returns:
        Their maxima, and the sums of exp(logits - maximum), shape [N, 2].
    """
    # As in `block_sums`, a maximum of -inf would give NaN
    top = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return torch.stack([top[:, 0], (logits - top).exp_().sum(1)], 1)


def block_probabilities(logits: Tensor, coefficients: Tensor) -> None:
    """Overwrite logits with b exp(logits - a), which is 0 where the exponential would be subnormal.

    Args:
        logits: Logits of one model, shape [N, block].
        coefficients: a, the log normaliser, and b, shape [N, 2].
    """
    normaliser, scale = coefficients.unsqueeze(-1).unbind(1)
    logits.sub_(normaliser)
    floor = math.log(torch.finfo(logits.dtype).tiny)
    if torch.compiler.is_compiling() or not bool((logits.amin(1) > floor).all()):
        logits.masked_fill_(~(logits > floor), -torch.inf)
    logits.exp_().mul_(scale)


def finite_(values: Tensor) -> Tensor:
    """Clamp -inf to the smallest finite number, in place: with weight 0 it then gives 0 instead of NaN."""
    return values.clamp_(min=torch.finfo(values.dtype).min)


def scratch(block: Tensor) -> Tensor:
    """The block itself, or a copy under torch.compile, which otherwise writes scratch values to memory."""
    return block.clone() if torch.compiler.is_compiling() else block


def _exponentiate(centred: Tensor, differences: Tensor, masses: Tensor, lowest: Tensor) -> None:
    """Set masses = exp(centred), and all three to 0 where that is subnormal: it slows products thirtyfold.

    `lowest` are the minima of the rows of `centred`.
    """
    torch.exp(centred, out=masses)
    # The masked passes are skipped if no entry needs them, a test that the compiler cannot branch on
    floor = math.log(torch.finfo(centred.dtype).tiny)
    if torch.compiler.is_compiling() or not bool((lowest > floor).all()):
        absent = ~(centred > floor)
        for values in (masses, differences, centred):
            values.masked_fill_(absent, 0)


class RowStats(NamedTuple):
    """Statistics of each row over the whole vocabulary, shape [N].

    In float64, as a small KL is computed as a difference of large normalisers.
    """

    normaliser: Tensor
    ref_normaliser: Tensor
    kl: Tensor
    entropy: Tensor
    forward_kl: Tensor
    expected_value: Tensor | None
    jsd: Tensor | None = None
    jsd_slope: Tensor | None = None  # the mean of its derivative, the sum of p s in `block_jsd`

    @staticmethod
    def of(sums: Tensor) -> "RowStats":
        """Combine the results of `TiledInputs.sums` for all blocks, stacked, shape [blocks, N, 9 or 10]."""
        # Each block b has its own maxima m_b and n_b: v = l - m_b and w = l' - n_b for logits l and l'
        columns = sums.double().unbind(2)
        top, ref_top, mass, ref_mass, cross, spread, forward, largest, ref_largest, *valued = columns
        # log sum_v exp(l_v) = log sum_b exp(m_b) sum_{v in b} exp(v), and the same for the reference
        normaliser = (top + mass.log()).logsumexp(0)
        ref_normaliser = (ref_top + ref_mass.log()).logsumexp(0)
        # p_v = exp(l_v - Z) = exp(v) exp(m_b - Z): the fraction turns sums of exp(v) into sums of p
        fraction, ref_fraction = (
            probabilities_of(log_share, sums.dtype)
            for log_share in (top - normaliser, ref_top - ref_normaliser)
        )
        # KL = sum_v p_v (l_v - l'_v) - (Z - Z'), where l - l' = (m_b - n_b) - (w - v)
        between = top - ref_top
        log_ratio = _over_blocks(fraction, mass * between - cross, largest, sums.dtype)
        kl = log_ratio - (normaliser - ref_normaliser)
        # The same with the roles exchanged, where the sums of exp(w) (w - v) have the other sign
        ref_log_ratio = _over_blocks(ref_fraction, forward - ref_mass * between, ref_largest, sums.dtype)
        forward_kl = ref_log_ratio + (normaliser - ref_normaliser)
        # H = Z - sum_v p_v l_v, where l = m_b + v
        entropy = normaliser - (fraction * (mass * top + spread)).sum(0)
        expected_value = (fraction * valued[0]).sum(0) if valued else None
        # Rounding can make what is 0 slightly negative
        kl, entropy, forward_kl = (value.clamp_(min=0) for value in (kl, entropy, forward_kl))
        return RowStats(normaliser, ref_normaliser, kl, entropy, forward_kl, expected_value)


def _over_blocks(fraction: Tensor, values: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of fraction · values over the blocks; +inf if the probability of an excluded token is not 0.

    `largest` are the largest of those probabilities before they are multiplied with the fraction.
    """
    infinite = fraction * largest >= torch.finfo(dtype).tiny
    return weighted(fraction, values).sum(0).masked_fill(infinite.any(0), torch.inf)
