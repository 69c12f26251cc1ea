"""Statistics and gradients from hidden states and heads, by all variants."""

import dataclasses
import functools
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import op_peers as peers, op_variants as own
from .measure import in_own_process, interleaved_times, machine, peak_megabytes
from .op_case import Case, Outcome, Size, exact
from .table import markdown, number, spread

SIZES = {
    "op-gpt2-fp32": Size("GPT-2 head, float32", 50_257, 768, 1024, torch.float32, 2048),
    "op-gpt2-bf16": Size("GPT-2 head, bfloat16", 50_257, 768, 1024, torch.bfloat16, 2048),
    "op-152k-fp32": Size("152k head, float32", 151_936, 896, 512, torch.float32, 512),
    "op-152k-bf16": Size("152k head, bfloat16", 151_936, 896, 128, torch.bfloat16, 256),
}
QUICK_SIZE = Size("small head, float32", 8_192, 256, 512, torch.float32, 1024)
SMALL_VOCABULARY = 100_000
ACCURACY_ROWS = 128
WARM_UP_ROWS = 16
RATIO_ROUNDS = (15, 120.0)  # maximum number of rounds, and seconds after which none starts

MC = "MC, tiled, with reference"
RB = "**RB, `tiled_policy_loss`**"
STATS = "**RB, `tiled_token_stats`**"
PLAIN_MC = "MC, plain, with reference"
PLAIN_RB = "RB, plain, float32 softmax"
COMPILED = ", compiled"

PACKAGES = ["torch", "transformers", "trl", "liger-kernel", "triton"]
COMPILE = {"compile_body": True}
BOTH = (torch.float32, torch.bfloat16)


class Variant(NamedTuple):
    """A variant of the operation.

    `loss` says what is differentiated: the log-probabilities (MC), the KL as well (RB), or a peer's own loss.
    What is not run everywhere is left out with the large vocabulary, where every run is long.
    """

    label: str
    loss: str
    function: Callable[..., Outcome]
    options: dict[str, object] = {}  # noqa: RUF012
    dtypes: tuple[torch.dtype, ...] = BOTH
    everywhere: bool = True


VARIANTS = [
    Variant("MC, tiled, policy alone", "MC", own.monte_carlo, {"with_reference": False}, everywhere=False),
    Variant(MC, "MC", own.monte_carlo),
    Variant(MC + COMPILED, "MC", own.monte_carlo, COMPILE),
    Variant(
        "MC, plain, policy alone", "MC", own.plain_monte_carlo, {"with_reference": False}, everywhere=False
    ),
    Variant(PLAIN_MC, "MC", own.plain_monte_carlo),
    Variant(RB, "RB", own.fused_loss),
    Variant(RB + COMPILED, "RB", own.fused_loss, COMPILE),
    Variant(RB + ", 128 rows a tile", "RB", own.fused_loss, {"tile_size": 128}, everywhere=False),
    Variant(RB + ", 256 rows a tile", "RB", own.fused_loss, {"tile_size": 256}, everywhere=False),
    Variant(STATS, "RB", own.recomputed_stats),
    Variant(STATS + COMPILED, "RB", own.recomputed_stats, COMPILE),
    Variant("RB, tiles under activation checkpointing", "RB", own.checkpointed, everywhere=False),
    Variant("RB, plain, as released", "RB", own.plain_rao_blackwell, {"upcast": False}, (torch.bfloat16,)),
    Variant(PLAIN_RB, "RB", own.plain_rao_blackwell, {"upcast": True}),
    Variant("TRL `selective_log_softmax`", "MC", peers.trl_selective),
    Variant("TRL chunked log-probabilities", "MC", peers.trl_chunked_logprob),
    Variant("TRL chunked divergence + log-probabilities", "RB", peers.trl_chunked_divergence),
    Variant("Liger fused linear JSD", "mean KL", peers.liger_jsd),
    Variant("Liger fused linear GRPO", "k3", peers.liger_grpo),
]
FLOORS = {f"matrix products alone, {str(dtype)[6:]}": dtype for dtype in BOTH}


def loss_weights(loss: str, case: Case, truth: Outcome) -> tuple[Tensor, Tensor]:
    """Score and KL weights with which our loss has the same gradient as a variant."""
    nothing = torch.zeros_like(case.kl_weights)
    if loss == "RB":
        return case.score_weights, case.kl_weights
    if loss == "MC":
        return case.score_weights, nothing
    if loss == "mean KL":
        return nothing, torch.full_like(nothing, 1 / len(nothing))
    return peers.grpo_score_weights(truth.logprobs, truth.ref_logprobs), nothing


def accuracy(variants: list[Variant], case: Case) -> dict[str, tuple[float | None, ...]]:
    """Relative errors, in the Euclidean norm, of KL, log-probabilities and gradients against float64."""
    truth, errors = exact(case), {}
    for loss in dict.fromkeys(variant.loss for variant in variants):
        score_weights, kl_weights = loss_weights(loss, case, truth)
        gradients = exact(case._replace(score_weights=score_weights, kl_weights=kl_weights)).gradients
        for variant in variants:
            if variant.loss == loss:
                got = variant.function(case, **variant.options)
                errors[variant.label] = (
                    _error(got.kl, truth.kl),
                    _error(got.logprobs, truth.logprobs),
                    max(_error(*pair) for pair in zip(got.gradients, gradients, strict=True)),
                )
    return errors


def _error(value: Tensor | None, true: Tensor) -> float | None:
    return None if value is None else float((value.double() - true).norm() / true.norm())


def memory(size: Size, index: int) -> float:
    """Peak memory of a variant beyond its inputs, in MB; run in a separate process."""
    variant, case = VARIANTS[index], dataclasses.replace(size, tokens=size.memory_tokens).case(draw=False)
    run = functools.partial(variant.function, **variant.options)
    return peak_megabytes(lambda: run(case.rows(8)), lambda: run(case))


def measure(size: Size, rounds: int) -> str:
    """The section of one size."""
    case = size.case()
    variants = [
        variant
        for variant in VARIANTS
        if size.dtype in variant.dtypes and (variant.everywhere or size.vocabulary <= SMALL_VOCABULARY)
    ]
    print(f"{size.name}: accuracy", file=sys.stderr)
    errors = accuracy(variants, case.rows(ACCURACY_ROWS))
    floors = {k: dtype for k, dtype in FLOORS.items() if size.dtype in (dtype, torch.bfloat16)}
    runs: dict[str, Callable[[], object]] = {k: own.floor(case, dtype) for k, dtype in floors.items()}
    for variant in variants:
        runs[variant.label] = functools.partial(variant.function, case, **variant.options)
        variant.function(case.rows(WARM_UP_ROWS), **variant.options)
    print(f"{size.name}: time", file=sys.stderr)
    times = interleaved_times(runs, rounds)
    print(f"{size.name}: ratios", file=sys.stderr)
    compared = [
        interleaved_times({label: runs[label] for label in labels}, *RATIO_ROUNDS)
        for labels in compared_labels(times)
    ]
    del runs, case
    print(f"{size.name}: memory", file=sys.stderr)
    peaks = {variant.label: in_own_process(memory, size, VARIANTS.index(variant)) for variant in variants}
    return section(size, times, peaks, errors) + "\n\n" + goals(compared, peaks)


def ratio(times: dict[str, list[float]], label: str, base: str) -> float:
    """The median over rounds of one variant's time divided by another's."""
    return statistics.median(a / b for a, b in zip(times[label], times[base], strict=True))


def section(
    size: Size,
    times: dict[str, list[float]],
    peaks: dict[str, float],
    errors: dict[str, tuple[float | None, ...]],
) -> str:
    """The description of the measurement, and the table of all variants."""
    seconds = {label: statistics.median(values) for label, values in times.items()}
    base = min((MC, MC + COMPILED), key=seconds.__getitem__)
    floor = min((label for label in FLOORS if label in times), key=seconds.__getitem__)
    losses = {variant.label: variant.loss for variant in VARIANTS}
    rows = [
        [
            label,
            losses.get(label, "–"),
            number(seconds[label]),
            f"{ratio(times, label, base):.2f}",
            f"{ratio(times, label, floor):.2f}",
            number(peaks.get(label)),
            *(number(error, 1) for error in errors.get(label, (None, None, None))),
        ]
        for label in times
    ]
    header = ["variant", "loss", "seconds", "/ MC", "/ floor", "extra MB", "KL", "logprob", "gradient"]
    return "\n\n".join(
        [
            f"V = {size.vocabulary:,}, D = {size.width}, {size.tokens:,} tokens ({size.memory_tokens:,} for "
            f"memory), {len(times[base])} rounds.",
            markdown(header, rows),
        ]
    )


def compared_labels(times: dict[str, list[float]]) -> list[list[str]]:
    """The ratios with goals, in two groups measured separately, so that fast ones get more rounds.

    First the faster floor, Monte Carlo and ours; then the fastest peer, plain Monte Carlo and ours.
    """
    peer_labels = {variant.label for variant in VARIANTS if variant.function.__module__ == peers.__name__}
    floor, peer = (
        min(times.keys() & labels, key=lambda label: statistics.median(times[label]))
        for labels in (FLOORS.keys(), peer_labels)
    )
    first, second = (
        [label + mode for label in labels for mode in ("", COMPILED)] for labels in ((MC, RB), (STATS, RB))
    )
    return [[floor, *first], [peer, PLAIN_MC, *second]]


def goals(groups: list[dict[str, list[float]]], peaks: dict[str, float]) -> str:
    """The ratios with goals, from separate rounds: medians and quartiles."""
    fast, slow = groups
    floor, peer = next(iter(fast)), next(iter(slow))
    compared = {
        "`tiled_policy_loss` / tiled MC with reference": ("1.05", "1.02", fast, RB, (MC, MC + COMPILED)),
        "`tiled_policy_loss` / floor": ("1.25", "1.1", fast, RB, (floor, floor)),
        "`tiled_token_stats` / plain MC with reference": ("1.35", "1.2", slow, STATS, (PLAIN_MC, PLAIN_MC)),
        f"`tiled_policy_loss` / fastest peer ({peer})": ("1", "1", slow, RB, (peer, peer)),
    }
    rows = [
        [name, bar, goal, spread(times, ours, bases[0]), spread(times, ours + COMPILED, bases[1])]
        for name, (bar, goal, times, ours, bases) in compared.items()
    ]
    memory_ratios = [f"{peaks[RB + mode] / peaks[PLAIN_RB]:.3f}" for mode in ("", COMPILED)]
    rows.append(["extra memory of `tiled_policy_loss` / plain RB", "0.15", "0.08", *memory_ratios])
    return (
        f"Ratios from {len(fast[MC])} more rounds of the first two's variants alone, {len(slow[RB])} of the "
        "others'; in brackets the quartiles of the rounds.\n\n"
    ) + markdown(["ratio", "bar", "goal", "in place (default)", "compiled"], rows)


def report(key: str, quick: bool) -> str:
    """The part of one size, or a small size with --quick."""
    warnings.simplefilter("ignore")  # warnings of the peers
    size, rounds = (QUICK_SIZE, 3) if quick else (SIZES[key], 2)
    heading = f"### {size.name}\n\n`python -m benchmarks {key}` on {machine(PACKAGES)}."
    return f"{heading}\n\n{measure(size, rounds)}"
