"""Whether two documents, texts or drawings agree, apart from rounding errors of another processor.

The same code gives other last bits on another processor. So statistics are compared within a tolerance. A
printed number may differ in its last digit only if the number itself lies at the edge between both roundings,
and coordinates of drawings may differ by what cannot be seen.
"""

import bisect
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile, zip_longest
from typing import Any
from urllib.parse import unquote

# Relative and absolute difference up to which two statistics agree.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
# Outcomes of runs are copied, with 12 digits, and not computed.
_COPIED = 1e-11
# Distance in points up to which coordinates agree, which are cut after two decimals.
_SEEN = 0.025

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-−+]?\d+)?")
_TAG = re.compile(r"(<[^>]*>)")


class Printed:
    """The numbers that were printed on a page, unrounded."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self._values = sorted({abs(value) for value in values})

    def allows(self, written: str, expected: str) -> bool:
        """Whether two texts agree but for numbers that lie at the edge between both of their roundings."""
        return written == expected or _agree(written, expected, self._at_edge)

    def _at_edge(self, ours: str, theirs: str) -> bool:
        if ours == theirs:
            return True
        first, second = (float(text.replace("−", "-")) for text in (ours, theirs))
        if abs(first - second) > 1.01 * max(_last_place(ours), _last_place(theirs)):
            return False
        edge = (first + second) / 2
        place = bisect.bisect_left(self._values, edge * (1 - _RELATIVE))
        return place < len(self._values) and self._values[place] <= edge * (1 + _RELATIVE)


def _last_place(text: str) -> float:
    """The size of one unit in the last digit of a printed number."""
    mantissa, _, exponent = text.replace("−", "-").partition("e")
    decimals = len(mantissa.partition(".")[2])
    zeros = 0 if decimals else len(mantissa) - len(mantissa.rstrip("0"))
    return float(10.0 ** (int(exponent or 0) - decimals + zeros))


def differences(
    written: Any, expected: Any, printed: Printed, place: tuple[str, ...] = (), copied: bool = False
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of each leaf in which two JSON documents differ, with a line about it."""
    if isinstance(written, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*written, *expected)):
            yield from differences(written.get(key), expected.get(key), printed, (*place, str(key)), copied)
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for index, pair in enumerate(zip(written, expected, strict=True)):
            yield from differences(*pair, printed, (*place[:-1], f"{(*place, '')[-2]}[{index}]"), copied)
    elif not _same(written, expected, printed, copied):
        ours, theirs = (_short(json.dumps(value)) for value in (written, expected))
        yield place, f"{'.'.join(place)}: {ours} is written, the results give {theirs}"


def _same(written: Any, expected: Any, printed: Printed, copied: bool) -> bool:
    kinds = {type(written), type(expected)}
    if float in kinds and kinds <= {int, float}:  # a bound of an interval is an integer
        relative, absolute = (_COPIED, 0.0) if copied else (_RELATIVE, _ABSOLUTE)
        return math.isclose(written, expected, rel_tol=relative, abs_tol=absolute)
    if isinstance(written, str) and isinstance(expected, str):
        return printed.allows(written, expected)
    return type(written) is type(expected) and bool(written == expected)


def line_differences(written: str, expected: str, printed: Printed) -> list[str]:
    """The lines in which two texts differ."""
    # Not splitlines, for which a changed line break is none
    lines = enumerate(zip_longest(written.split("\n"), expected.split("\n"), fillvalue=""), start=1)
    found = []
    for number, (ours, theirs) in lines:
        if not printed.allows(ours, theirs):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
            start = sum(1 for _ in same)
            one, other = (repr(_short(text, start)) for text in (ours, theirs))
            found.append(f"line {number}: {one} is written, the results give {other}")
    return found


def same_drawing(written: str, expected: str) -> bool:
    """Whether two drawings, as data URIs, have the same text, and shapes that look the same."""
    parts = [_TAG.split(unquote(uri)) for uri in (written, expected)]

    def near(ours: str, theirs: str) -> bool:
        return abs(float(ours) - float(theirs)) <= _SEEN

    return len(parts[0]) == len(parts[1]) and all(
        ours == theirs or (ours.startswith("<") and _agree(ours, theirs, near))
        for ours, theirs in zip(*parts, strict=True)
    )


def _agree(written: str, expected: str, same: Callable[[str, str], bool]) -> bool:
    """Whether two texts are equal, apart from numbers that are the same in another sense."""
    if _NUMBER.split(written) != _NUMBER.split(expected):
        return False
    return all(map(same, _NUMBER.findall(written), _NUMBER.findall(expected)))


def _short(text: str, start: int = 0, width: int = 120) -> str:
    begin = max(0, min(start - width // 2, len(text) - width))
    found = text[begin : begin + width]
    return f"{'…' if begin else ''}{found}{'…' if begin + width < len(text) else ''}"
