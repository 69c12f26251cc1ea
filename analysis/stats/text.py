"""Formatting of numbers, intervals and p-values for sentences and tables."""

import math
from collections.abc import Iterable

from analysis.stats.contrast import TTest
from analysis.stats.intervals import Interval
from analysis.stats.swaps import SwapTest


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits and a minus sign; a dash for None and `nan`.

    Example:
        >>> number(-0.012345), number(1234.5), number(float("nan"))
        ('−0.0123', '1230', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) < 1e-12:  # a rounding error of 0
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    if -4 < places <= digits + 4:
        text = f"{round(value, places):.{max(0, places)}f}"
    else:
        text = f"{value:.{digits - 1}e}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    """`number` with an explicit sign."""
    return f"+{number(value)}" if value >= 1e-12 else number(value)


def count(amount: int, noun: str) -> str:
    """An amount with its noun in the singular or plural."""
    ending = "" if amount == 1 else "es" if noun.endswith("ch") else "s"
    return f"{amount} {noun}{ending}"


def probability(p_value: float) -> str:
    """`p = ...` with two significant digits, without a line break."""
    return f"p\u00a0=\u00a0{number(p_value, 2)}"


def percent(level: float) -> str:
    """A level in percent with up to five significant digits.

    Example:
        >>> percent(0.95), percent(1 - 0.05 / 4), percent(1 - 0.05 / 52)
        ('95%', '98.75%', '99.904%')
    """
    return f"{100 * level:.5g}%"


def fixed(value: float, decimals: int) -> str:
    """A number with a fixed number of decimals."""
    return f"{value:.{decimals}f}"


def decimals_of(values: Iterable[float | None]) -> int:
    """The number of decimals with which a column shows at least three digits of its largest number.

    Example:
        >>> decimals_of([0.0123, 0.5]), decimals_of([12.3, 0.5]), decimals_of([1234.5])
        (3, 2, 0)
    """
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=1.0)
    places = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    return min(6, max(places, 2 if largest < 100 else 1 if largest < 1000 else 0))


def aligned(value: float | None, decimals: int, *, sign: bool = False) -> str:
    """A number of a column with fixed decimals; a dash for None and `nan`."""
    if value is None or math.isnan(value):
        return "–"
    text = fixed(value, decimals).replace("-", "−")
    if float(text.replace("−", "-")) == 0:
        text = text.replace("−", "")
    return f"+{text}" if sign and value > 0 else text


def aligned_ends(interval: Interval | None, decimals: int) -> str:
    """The ends of an interval in a column with fixed decimals; a dash if there is none."""
    return "–" if interval is None else " to ".join(aligned(end, decimals) for end in interval.ends)


def with_ends(
    value: float, interval: Interval | None, decimals: int | None = None, *, sign: bool = False
) -> str:
    """A number with the ends of its interval, if it has one; by default with the decimals that these need."""
    if decimals is None:
        decimals = decimals_of([value, *(interval.ends if interval else ())])
    text = aligned(value, decimals, sign=sign)
    return text if interval is None else f"{text} ({aligned_ends(interval, decimals)})"


def whole_percent(share: float) -> str:
    """A share in percent without decimals."""
    return f"{100 * share:.0f}%"


def interval_text(interval: Interval | None) -> str:
    """The interval with its level, or the reason why there is none."""
    if interval is None:
        return "no interval: too few replicates"
    return f"{percent(interval.level)} CI {ends_text(interval)}"


def ends_text(interval: Interval | None, digits: int = 3) -> str:
    """The ends of an interval, without its level; a dash if there is none."""
    return "–" if interval is None else f"{number(interval.low, digits)} to {number(interval.high, digits)}"


def these_blocks(blocks: int) -> str:
    """A condition, in words; "" without blocks.

    Example:
        >>> these_blocks(1), these_blocks(2), these_blocks(7), these_blocks(0)
        ('on this one block', 'on these two blocks', 'on these 7 blocks', '')
    """
    if blocks == 1:
        return "on this one block"
    return f"on these {'two' if blocks == 2 else blocks} blocks" if blocks else ""


def evidence_text(test: SwapTest | TTest, alpha: float = 0.05) -> str:
    """The p-value and its method; from random swaps near `alpha` also its Monte Carlo error."""
    if isinstance(test, TTest):
        over = f" over {count(test.units, 'block')}" if test.over_blocks else ""
        return f"t test{over}, {probability(test.p_value)}"
    if test.exact:
        return f"exact swap {probability(test.p_value)}"
    error = math.sqrt(test.p_value * (1 - test.p_value) / test.resamples)
    near = alpha / 2 <= test.p_value <= 2 * alpha
    spread = f" ± {number(error, 1)}" if near else ""
    return f"swap {probability(test.p_value)}{spread} from {test.resamples:,} random swaps"
