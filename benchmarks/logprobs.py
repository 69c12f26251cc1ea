"""Log-probabilities for the losses of DPO and SFT: tile by tile, and from full logits."""

import functools
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.functional.tiled import logprobs

from .measure import in_own_process, interleaved_times, machine, peak_megabytes
from .table import markdown, number, spread


class Size(NamedTuple):
    """A head of V tokens and D inputs, applied to a number of tokens."""

    name: str
    vocabulary: int
    width: int
    tokens: int


SIZES = (
    Size("demo", 239, 64, 3072),
    Size("", 2048, 128, 3072),
    Size("as in the training steps", 8192, 256, 3072),
)
ROUNDS, SECONDS = 9, 60
TEXT = """`python -m benchmarks logprobs` on {machine}. Forward and backward pass from hidden states and a
head of D inputs to the sum of all log-probabilities, float32: `tiled_logprobs`, which DPO and SFT use, and
full logits with log_softmax, which they used before and still use for up to 2^20 logits. CPU seconds of one
thread, medians of 3 to {rounds} rounds in which the two take turns, and the ratio with its quartiles; memory
beyond the inputs and the gradients' own size."""


def arguments(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens // 32, 32, size.width, generator=generator)
    weight = torch.randn(size.vocabulary, size.width, generator=generator) / size.width**0.5
    tokens = torch.randint(size.vocabulary, hidden.shape[:2], generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens


def tiled(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities tile by tile, however few there are."""
    logprobs._AT_ONCE = 0
    return logprobs.tiled_logprobs(hidden, weight, tokens)


def plain(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """The same from full logits, as `completion_logprobs` has it for models that cannot be split."""
    logprobs = ((hidden @ weight.T).float() / 1.0).log_softmax(-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"tiled": tiled, "plain": plain}


def step(way: str, case: tuple[Tensor, Tensor, Tensor]) -> None:
    """Forward and backward pass."""
    torch.autograd.grad(WAYS[way](*case).sum(), case[:2])


def memory(way: str, size: Size) -> float:
    """Peak memory in MB beyond inputs and gradients; run in a separate process."""
    torch.set_num_threads(1)
    case, small = arguments(size), arguments(Size("", 64, 8, 64))
    gradients = sum(4 * leaf.numel() for leaf in case[:2]) / 1e6
    return peak_megabytes(lambda: step(way, small), lambda: step(way, case)) - gradients


def report(quick: bool) -> str:
    """The part of the document."""
    torch.set_num_threads(1)
    rows = []
    for size in SIZES[:1] if quick else SIZES:
        case = arguments(size)
        runs = {way: functools.partial(step, way, case) for way in WAYS}
        for run in runs.values():
            run()
        times = interleaved_times(runs, 3 if quick else ROUNDS, SECONDS, clock=time.process_time)
        peaks = [in_own_process(memory, way, size) for way in WAYS]
        shape = [f"{value:,}" for value in (size.vocabulary, size.width, size.tokens)]
        medians = [number(statistics.median(times[way])) for way in WAYS]
        rows.append([size.name, *shape, *medians, spread(times, *WAYS), *map(number, peaks)])
        print(rows[-1], file=sys.stderr, flush=True)
    header = ["head", "V", "D", "tokens", "tiled, s", "plain, s", "ratio", "tiled, MB", "plain, MB"]
    text = textwrap.fill(TEXT.format(machine=machine(["torch"]), rounds=ROUNDS), 118, break_on_hyphens=False)
    return f"## Log-probabilities for DPO and SFT\n\n{text}\n\n{markdown(header, rows)}"
