"""The two ratios whose bars lie close to what a shared machine scatters, over many rounds."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence

from . import op, op_variants
from .measure import interleaved_times, machine
from .table import markdown

ROUNDS = {"op-gpt2-fp32": 80, "op-gpt2-bf16": 60}
# Ratio -> ours, base, bar, goal.
RATIOS = {
    "`tiled_policy_loss` / tiled MC with reference": (op.RB, op.MC, "1.05", "1.02"),
    "`tiled_policy_loss` / floor": (op.RB, next(iter(op.FLOORS)), "1.25", "1.1"),
}


def report(key: str, quick: bool) -> str:
    """The ratios of one size as Markdown."""
    size, rounds = (op.QUICK_SIZE, 5) if quick else (op.SIZES[key], ROUNDS[key])
    case = size.case()
    runs: dict[str, Callable[[], object]] = {
        label: op_variants.floor(case, dtype) for label, dtype in [next(iter(op.FLOORS.items()))]
    }
    for variant in op.VARIANTS:
        if variant.label in (op.MC, op.RB):
            runs[variant.label] = functools.partial(variant.function, case, **variant.options)
    times = interleaved_times(runs, rounds)
    rows = [
        [name, bar, goal, median_text(times[ours], times[base]), f"{fastest(times[ours], times[base]):.3f}"]
        for name, (ours, base, bar, goal) in RATIOS.items()
    ]
    return (
        f"### {size.name}: {rounds} rounds of three\n\n`python -m tests.bench {key}-rounds` on "
        f"{machine(op.PACKAGES)}. The median of the rounds' ratios with its 95 % interval, and the ratio of "
        "the means of each one's fastest quarter: what slows a round from outside only ever adds time.\n\n"
    ) + markdown(["ratio", "bar", "goal", "median", "fastest quarters"], rows)


def median_text(ours: Sequence[float], base: Sequence[float]) -> str:
    """The median of paired ratios, with the interval that its order statistics give.

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
    """The mean of the fastest quarter of one, over that of the other.

    Example:
        >>> fastest([2.0, 9.0, 9.0, 9.0], [1.0, 5.0, 5.0, 5.0])
        2.0
    """

    def quick(times: Sequence[float]) -> float:
        return statistics.mean(sorted(times)[: max(1, len(times) // 4)])

    return quick(ours) / quick(base)
