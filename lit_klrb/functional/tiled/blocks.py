"""What happens to one block of logits [N, block] of the policy and one of the reference.

Passes over the logits are all that Rao-Blackwellisation costs over Monte Carlo: they are few and in place, a
few rows at a time, which then stay in the cache; `fused` makes one or two of them.
"""

import functools
import math
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError

P = ParamSpec("P")
Sums = TypeVar("Sums", Tensor, None)

# Numbers that a CPU's passes go over at a time, 4 MB of each block: more of them leave the cache, and with
# fewer what it takes to begin a pass on every core counts.
_CACHED = 2**20


def fused(body: Callable[P, Sums], device: torch.device) -> Callable[P, Sums]:
    """The body as torch.compile fuses it, on a GPU or where the environment says `LIT_KLRB_COMPILE=1`.

    On a CPU that takes a C++ compiler, half a minute the first time and some seconds in every process, for no
    more than a few per cent of the operation's time: by default the body runs as it is written, a few rows at
    a time.
    """
    setting = os.environ.get("LIT_KLRB_COMPILE", "auto")
    if setting not in ("0", "1", "auto"):
        raise ConfigurationError(f"LIT_KLRB_COMPILE is {setting!r}; 0, 1 or auto expected")
    wanted = setting == "1" or (setting == "auto" and device.type == "cuda")
    return _compiled(body) if wanted else functools.partial(_by_rows, body)


@functools.cache
def _compiled(body: Callable[P, Sums]) -> Callable[P, Sums]:
    return torch.compile(body, dynamic=True)


def _by_rows(body: Callable[..., Any], *blocks: Tensor) -> Any:
    """The body on as many rows at a time as the cache holds; what it returns, one below another."""
    rows = max(1, _CACHED // max(1, blocks[0].shape[1]))
    parts = [body(*part) for part in zip(*(torch.split(block, rows) for block in blocks), strict=True)]
    return None if parts[0] is None else torch.cat(parts)


def block_sums(logits: Tensor, ref_logits: Tensor, masses: Tensor) -> Tensor:
    """What one block adds to the normalisers, the KL and the entropy of its rows.

    With v and w the logits of policy and reference minus their largest in the block.

    Args:
        logits: Policy, [N, block]; overwritten with nothing of use.
        ref_logits: Reference, [N, block]; overwritten with exp(v) (w - v).
        masses: Overwritten with exp(v), [N, block].

    Returns:
        These largest, and the sums of exp(v), exp(w), exp(v) (w - v) and exp(v) v, together [N, 6].
    """
    logits = _scratch(logits)
    lowest = torch.finfo(logits.dtype).min  # for the top of a block that a model excludes altogether
    top = logits.amax(1, keepdim=True).clamp_(min=lowest)
    ref_top = ref_logits.amax(1, keepdim=True).clamp_(min=lowest)
    ref_mass = torch.exp(ref_logits.sub_(ref_top), out=masses).sum(1)
    _exponentiate(logits.sub_(top), ref_logits, masses)
    mass, cross, spread = masses.sum(1), ref_logits.mul_(masses).sum(1), logits.mul_(masses).sum(1)
    return torch.stack([top[:, 0], ref_top[:, 0], mass, ref_mass, cross, spread], 1)


def block_gradient(
    products: Tensor, masses: Tensor, coefficients: Tensor, values: Tensor | None = None
) -> None:
    """Overwrite the products exp(v) (w - v) with the gradient exp(v) (a + b (w - v) + c x).

    Args:
        products: exp(v) (w - v), [N, block].
        masses: exp(v), [N, block].
        coefficients: a and b, and c where there are token values, [N, 2] or [N, 3].
        values: Token values x, [N, block].
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
    """Overwrite the reference's logits with the gradient p (a + b (log q - log p) + c log p + d x).

    Args:
        logits: Policy, [N, block]; p is their softmax. Overwritten with nothing of use.
        ref_logits: Reference, [N, block]; q is their softmax.
        masses: Overwritten with p, [N, block].
        normalisers: Of policy and reference, [N, 2].
        coefficients: a, b and c, and d where there are token values, [N, 3] or [N, 4].
        values: Token values x, [N, block].
    """
    logits = _scratch(logits)
    normaliser, ref_normaliser = normalisers.unsqueeze(-1).unbind(1)
    constant, slope, surprise, *by_value = coefficients.unsqueeze(-1).unbind(1)
    if values is not None:
        constant = torch.addcmul(constant, by_value[0], values)
    _exponentiate(logits.sub_(normaliser), ref_logits.sub_(ref_normaliser), masses)
    finite_(ref_logits).mul_(slope).addcmul_(logits, surprise)
    ref_logits.add_(constant).mul_(masses)


def finite_(values: Tensor) -> Tensor:
    """Infinite values made large, in place: where the KL has no weight they then count for nothing."""
    return values.clamp_(min=torch.finfo(values.dtype).min)


def _scratch(block: Tensor) -> Tensor:
    """The block itself; for the compiler a copy, so that it does not write what nobody reads."""
    return block.clone() if torch.compiler.is_compiling() else block


def _exponentiate(centred: Tensor, ref_centred: Tensor, masses: Tensor) -> None:
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


class _Workspace(threading.local):
    """Memory that a thread's calls on a CPU use one after another.

    A CPU gives large memory back when it is freed: the next call would have every page of it zeroed again,
    some 4 % of the operation's time. On a GPU torch keeps it anyway.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, like: Tensor, count: int) -> Tensor:
        """So many numbers of the type and on the device of `like`; on a CPU the same memory each time."""
        if like.device.type != "cpu":
            return like.new_empty(count)
        key = name, like.dtype
        if key not in self._kept or len(self._kept[key]) < count:
            self._kept.pop(key, None)  # before the larger one is made
            with torch.inference_mode(False):  # what is made within it could not be written outside
                self._kept[key] = torch.empty(count, dtype=like.dtype)
        return self._kept[key][:count]


_WORKSPACE = _Workspace()


class Buffers:
    """Memory for the logits of a tile and the heads of a block: on a CPU there is one set of it a thread.

    Args:
        like: Tells type and device.
        rows: Rows of the largest tile.
        columns: Columns of the widest block.
        kept: Columns for which a tile's reference logits and masses are kept; by default one block's.
    """

    def __init__(self, like: Tensor, rows: int, columns: int, kept: int | None = None) -> None:
        self._keeps = kept is not None
        sizes = {"logits": columns, "ref_logits": kept or columns, "masses": kept or columns}
        self._logits, self._ref_logits, self._masses = (
            _WORKSPACE.take(name, like, rows * count) for name, count in sizes.items()
        )
        self._columns = columns
        self._weight: Tensor | None = None

    def block(self, rows: int, block: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, reference logits and masses [rows, block]; the first are the same for every block."""
        count, first = block.stop - block.start, block.start if self._keeps else 0
        kept = slice(rows * first, rows * (first + count))
        flat = self._logits[: rows * count], self._ref_logits[kept], self._masses[kept]
        logits, ref_logits, masses = (part.view(rows, count) for part in flat)
        return logits, ref_logits, masses

    def precise(self, weight: Tensor) -> Tensor:
        """A block's rows of a head in the type of the logits: if a copy, it lasts until the next."""
        if weight.dtype == self._logits.dtype:
            return weight
        if self._weight is None or self._weight.shape[1] != weight.shape[1]:
            memory = _WORKSPACE.take("weight", self._logits, self._columns * weight.shape[1])
            self._weight = memory.view(self._columns, weight.shape[1])
        return self._weight[: len(weight)].copy_(weight)


class RowStats(NamedTuple):
    """Statistics of each row over the whole vocabulary, in float64, [N].

    There the normalisers, large numbers of which a small KL is the difference, are precise enough.
    """

    normaliser: Tensor
    ref_normaliser: Tensor
    kl: Tensor
    entropy: Tensor
    expected_value: Tensor | None

    @staticmethod
    def of(sums: Tensor) -> "RowStats":
        """Combine what `Problem.sums` returned for every block, stacked, [blocks, N, 6 or 7]."""
        top, ref_top, mass, ref_mass, cross, spread, *valued = sums.double().unbind(2)
        normaliser = (top + mass.log()).logsumexp(0)
        ref_normaliser = (ref_top + ref_mass.log()).logsumexp(0)
        share = (top - normaliser).exp()
        log_ratio = (share * (mass * (top - ref_top) - cross)).sum(0)
        kl = log_ratio - (normaliser - ref_normaliser)
        entropy = normaliser - (share * (mass * top + spread)).sum(0)
        expected_value = (share * valued[0]).sum(0) if valued else None
        return RowStats(normaliser, ref_normaliser, kl.clamp_(min=0), entropy.clamp_(min=0), expected_value)
