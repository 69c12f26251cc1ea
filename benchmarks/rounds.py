"""The two ratios that need many rounds, as their bars are within the variation of a shared machine."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from . import op, op_variants
from .measure import interleaved_times, machine
from .table import markdown

MODES = ("", op.COMPILED)
ROUNDS = {"op-gpt2-fp32": 80, "op-gpt2-bf16": 50}
FLOOR = next(iter(op.FLOORS))
# Ratio -> base, bar, goal; if the base can be compiled, compiled variants are compared too.
RATIOS = {
    "`tiled_policy_loss` / tiled MC with reference": (op.MC, "1.05", "1.02"),
    "`tiled_policy_loss` / floor": (FLOOR, "1.25", "1.1"),
}


def report(key: str, quick: bool) -> str:
    """The ratios of one size as Markdown."""
    size, rounds = (op.QUICK_SIZE, 5) if quick else (op.SIZES[key], ROUNDS[key])
    case = size.case()
    runs: dict[str, Callable[[], object]] = {FLOOR: op_variants.floor(case, op.FLOORS[FLOOR])}
    for variant in op.VARIANTS:
        if variant.label in [label + mode for label in (op.MC, op.RB) for mode in MODES]:
            runs[variant.label] = functools.partial(variant.function, case, **variant.options)
    for run in runs.values():
        run()
    times = interleaved_times(runs, rounds)
    rows = [
        [name, bar, goal, *(cell for mode in MODES for cell in cells(times, base, mode))]
        for name, (base, bar, goal) in RATIOS.items()
    ]
    header = ["ratio", "bar", "goal", "in place (default)", "fastest", "compiled", "fastest"]
    return (
        f"### {size.name}: {rounds} rounds of {len(runs)}\n\n`python -m benchmarks {key}-rounds` on "
        f"{machine(op.PACKAGES)}. The median of the rounds' ratios with its 95 % interval, and the ratio of "
        "the means of each one's fastest quarter: what slows a round from outside only ever adds time. "
        "Compiled is compared with compiled.\n\n"
    ) + markdown(header, rows)


def cells(times: Mapping[str, Sequence[float]], base: str, mode: str) -> tuple[str, str]:
    """Both ratios of our variant to a base, in the same mode if the base has modes."""
    pair = times[op.RB + mode], times.get(base + mode, times[base])
    return median_text(*pair), f"{fastest(*pair):.3f}"


def median_text(ours: Sequence[float], base: Sequence[float]) -> str:
    """The median of paired ratios with an interval from order statistics.

    Example:
        >>> median_text([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1.0] * 8)
        '4.500 (2.000 to 7.000)'
    """
    ratios = sorted(a / b for a, b in zip(ours, base, strict=True))
    count = len(ratios)
    reach = 1.96 * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach) - 1)
    return f"{statistics.median(ratios):.3f} ({ratios[low]:.3f} to {ratios[high]:.3f})"


def fastest(ours: Sequence[float], base: Sequence[float]) -> float:
    """The mean of the fastest quarter of the first, divided by that of the second.

    Example:
        >>> fastest([2.0, 9.0, 9.0, 9.0], [1.0, 5.0, 5.0, 5.0])
        2.0
    """

    def quick(times: Sequence[float]) -> float:
        return statistics.mean(sorted(times)[: max(1, len(times) // 4)])

    return quick(ours) / quick(base)
