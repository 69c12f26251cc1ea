"""Recomputes a report and lists the differences.

The same code gives other last bits on another processor, so no byte of a page decides whether a result is
honest, and a hash says only that a file is as it was written. Statistics are compared within a tolerance, the
page as text. A printed number may differ in its last digit only if the number itself lies at the edge between
both roundings, and coordinates of drawings may differ by what cannot be seen.
What depends on the code (statistics, words, drawings) is compared always. If the report was written by other
code, words, drawings and fields that differ are listed as not compared, as they change with the code. Numbers
and verdicts that differ are differences then, too: the same results give others, or the page was altered.
"""

import bisect
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from analysis.report.assessment import load_assessment
from analysis.report.build import CHECKSUM, checksum_of, code_version, compose, engines
from analysis.report.sections import Builder
from analysis.results.layout import NUMBERS, NUMBERS_SCHEMA
from analysis.results.store import DamagedFileError, read_bytes, read_json
from analysis.results.sweep import Sweep
from analysis.stats.text import count, printed
from lit_klrb.errors import ConfigurationError

_DRAWING = re.compile(r'src="(data:image/svg\+xml,[^"]*)"')
# Keys of the document that are compared separately.
_APART = ("engines", "code", "page", CHECKSUM)
# Keys whose values come from plan and results without a computation.
_COPIED = (("plan", "hash"), ("runs",), ("sections", "provenance"), ("sections", "tradeoff", "runs"))
# Keys of words that are verdicts, or say on what.
_VERDICTS = {"claim", "control", "decisions", "outcome", "bias_outcome", "treatment"}
# Stands for the value of a key that a document does not have.
_NOTHING = "nothing"
# Number of differences of each kind that are listed of a report by other code.
_LISTED = 20
# Relative and absolute difference up to which two statistics agree.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
# Outcomes of runs are copied, with 12 digits, and not computed.
_DIGITS = 1e-11
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


class Difference(NamedTuple):
    """A leaf in which two JSON documents differ."""

    keys: tuple[str, ...]
    line: str
    counts: bool  # whether it is a number or verdict of both, and not words or a field that one does not have


def differences(
    written: Any, expected: Any, printed: Printed, place: tuple[str, ...] = (), copied: bool = False
) -> Iterator[Difference]:
    """Yield each leaf in which two JSON documents differ."""
    if isinstance(written, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*written, *expected)):
            pair = written.get(key, _NOTHING), expected.get(key, _NOTHING)
            yield from differences(*pair, printed, (*place, str(key)), copied)
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for index, pair in enumerate(zip(written, expected, strict=True)):
            yield from differences(*pair, printed, (*place[:-1], f"{(*place, '')[-2]}[{index}]"), copied)
    elif not _same(written, expected, printed, copied):
        ours, theirs = (json.dumps(value) for value in (written, expected))
        words = '"' in ours + theirs and not _VERDICTS.intersection(place[-2:])
        counts = not words and _NOTHING not in (written, expected)
        line = f"{'.'.join(place)}: {_short(ours)} is written, the results give {_short(theirs)}"
        yield Difference(place, line, counts)


def _same(written: Any, expected: Any, printed: Printed, copied: bool) -> bool:
    kinds = {type(written), type(expected)}
    if float in kinds and kinds <= {int, float}:  # a bound of an interval is an integer
        relative, absolute = (_DIGITS, 0.0) if copied else (_RELATIVE, _ABSOLUTE)
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


@dataclass
class Verification:
    """The result of comparing a report with its sweep."""

    sweep: Sweep
    # One line per difference, including what rules out a verdict
    differences: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)  # what could not be compared, and why


def verify(path: Path, added: Sequence[Builder] = ()) -> Verification:
    """Recompute a report from the results of its sweep.

    A page that is not there, as those of published sweeps in this repository, is not compared: `results.json`
    has all of its numbers.

    Raises:
        ConfigurationError: If there is no report at `path`.
        DamagedFileError: If the report or the plan cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / NUMBERS).exists():
        raise ConfigurationError(f"{path}: a report with {NUMBERS} beside it is expected; write one first")
    written = _read_numbers(folder / NUMBERS)
    page = path if path.suffix == ".html" else folder / Path(str(_at(written, "page", "name"))).name
    if page == path and not os.path.lexists(page):
        raise ConfigurationError(f"{page}: there is no such page; write one first")
    assessment = load_assessment(folder / written["runs"])
    made = written.get("made")
    with printed() as values:
        expected, numbers = compose(assessment, page, added, made if isinstance(made, dict) else {})
    found = Verification(assessment.sweep)
    # A hash says only that the files are as they were written
    if written.get(CHECKSUM) != checksum_of(written):
        found.differences.append(f"{NUMBERS}: was changed after it was written: it has another checksum")
    hashed = hashlib.sha256(read_bytes(page)).hexdigest() if os.path.lexists(page) else ""
    if hashed and hashed != _at(written, "page", "sha256"):
        found.differences.append(f"{page.name}: is not the page that {NUMBERS} was written with")
    _compare(written, numbers, page, expected, Printed(values), found, tuple(added))
    # A page can agree with files that are not those of its plan
    found.differences += found.sweep.invalid
    unread = [problem.text for problem in found.sweep.problems if problem.unread]
    found.not_compared += [text.partition(": ")[0] + ": it cannot be read" for text in unread]
    return found


def _read_numbers(path: Path) -> dict[str, Any]:
    written = read_json(path)
    if not isinstance(written, dict) or written.get("schema") != NUMBERS_SCHEMA:
        raise DamagedFileError(f"{path}: not the numbers of a report that this version reads")
    if not isinstance(written.get("runs"), str):
        raise DamagedFileError(f"{path}: does not name the directory of its sweep")
    return written


def _compare(
    written: dict[str, Any],
    numbers: dict[str, Any],
    page: Path,
    content: bytes,
    values: Printed,
    found: Verification,
    added: tuple[Builder, ...],
) -> None:
    """Compare numbers, text and drawings."""
    expected = json.loads(json.dumps(numbers))
    ours, theirs = ({k: v for k, v in one.items() if k not in _APART} for one in (written, expected))
    of_code = [
        one._replace(line=f"{NUMBERS}: {one.line}")
        for one in differences(ours, theirs, values)
        if not any(one.keys[: len(copied)] == copied for copied in _COPIED)
    ]
    counted, words = ([one.line for one in of_code if one.counts is kind] for kind in (True, False))
    for copied in _COPIED:
        one, other = (_at(document, *copied) for document in (ours, theirs))
        lines = differences(one, other, values, copied, copied=True)
        found.differences += [f"{NUMBERS}: {one.line}" for one in lines]
    if os.path.lexists(page):
        words += _of_page(written, page, content, values, found)
    code, now = written.get("code"), code_version(added)
    if code == now:
        found.differences += [*counted, *words]
        return
    by, here = (f"version {_at(one, 'version')} ({str(_at(one, 'sources'))[:12]})" for one in (code, now))
    other = f"the report was written by {by}, this is {here}"
    if counted:
        why = f"numbers or verdicts{_more(counted)}: {other}, and either the code or the report changed"
        found.differences += [f"{count(len(counted), 'difference')} in {why}", *counted[:_LISTED]]
    if words:
        why = f"words, fields or drawings{_more(words)}: {other}"
        found.not_compared += [f"{count(len(words), 'difference')} in {why}", *words[:_LISTED]]


def _more(lines: Sequence[str]) -> str:
    return f" (and {len(lines) - _LISTED} more)" if len(lines) > _LISTED else ""


def _of_page(
    written: dict[str, Any], page: Path, expected: bytes, values: Printed, found: Verification
) -> list[str]:
    """The lines and drawings in which a page differs."""
    texts = read_bytes(page).decode(errors="replace"), expected.decode()
    drawings = [_DRAWING.findall(text) for text in texts]
    ours, theirs = (_DRAWING.sub("", text) for text in texts)
    lines = [f"{page.name}: {line}" for line in line_differences(ours, theirs, values)]
    if len(drawings[0]) != len(drawings[1]):
        return [*lines, f"{page.name}: has {len(drawings[0])} drawings, the results give {len(drawings[1])}"]
    changed = [
        f"{page.name}: drawing {number} is not the one that the results give"
        for number, pair in enumerate(zip(*drawings, strict=True), start=1)
        if not same_drawing(*pair)
    ]
    then, now = written.get("engines"), engines()
    if changed and then != now:
        other = (
            f"{name} {_at(then, name)} (here {now[name]})" for name in now if _at(then, name) != now[name]
        )
        found.not_compared.append(
            f"{page.name}: {len(changed)} of its drawings, which were made under {', '.join(other)}"
        )
        return lines
    return [*lines, *changed]


def _at(value: Any, *keys: str) -> Any:
    """The value of a document at a path of keys; None if it does not exist."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
