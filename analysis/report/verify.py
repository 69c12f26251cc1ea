"""Recomputes the numbers of a report from its results, and lists those that differ.

The same code gives other last bits on another processor, so numbers are compared within a tolerance. The page
is compared by its hash, which `results.json` has, and is not made again. If the report was written by other
code, its words and the fields that only one of both has are listed as not compared; numbers and verdicts that
differ are differences then, too: the same results give others, or the report was altered.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analysis.report.assessment import load_assessment
from analysis.report.build import CHECKSUM, checksum_of, code_version, numbers_of
from analysis.report.sections import Builder, sections_of
from analysis.results.layout import NUMBERS, NUMBERS_SCHEMA
from analysis.results.store import DamagedFileError, read_bytes, read_json
from analysis.results.sweep import Sweep
from analysis.stats.text import count
from lit_klrb.errors import ConfigurationError

# Keys of the document that say where and when it was written, or are checked by themselves.
_APART = {"schema", "runs", "page", "code", "made", CHECKSUM}
# Keys of words that are verdicts, or say on what.
_VERDICTS = {"claim", "control", "decisions", "outcome", "bias_outcome", "treatment", "plan"}
# Stands for the value of a key that a document does not have.
_NOTHING = "nothing"
# Number of differences that are listed of a report by other code.
_LISTED = 20
# Relative and absolute difference up to which two numbers agree.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


class Difference(NamedTuple):
    """A leaf in which two JSON documents differ."""

    line: str
    counts: bool  # whether it is a number or verdict of both, and not words or a field that one does not have


def differences(written: Any, expected: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield each leaf in which two JSON documents differ."""
    if isinstance(written, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*written, *expected)):
            pair = written.get(key, _NOTHING), expected.get(key, _NOTHING)
            yield from differences(*pair, (*path, str(key)))
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for index, pair in enumerate(zip(written, expected, strict=True)):
            yield from differences(*pair, (*path[:-1], f"{path[-1]}[{index}]"))
    elif not _same(written, expected):
        one, other = (json.dumps(value, ensure_ascii=False)[:120] for value in (written, expected))
        words = any(isinstance(value, str) for value in (written, expected))
        counts = _NOTHING not in (written, expected) and (not words or bool(_VERDICTS & {*path}))
        yield Difference(f"{NUMBERS}: {'.'.join(path)}: {one} is written, the results give {other}", counts)


def _same(written: Any, expected: Any) -> bool:
    kinds = {type(written), type(expected)}
    if float in kinds and kinds <= {int, float}:  # a bound of an interval is an integer
        return math.isclose(written, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return len(kinds) == 1 and bool(written == expected)


@dataclass
class Verification:
    """The result of comparing a report with its sweep."""

    sweep: Sweep
    # One line per difference, including what rules out a verdict
    differences: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)  # what could not be compared, and why


def verify(path: Path, added: Sequence[Builder] = ()) -> Verification:
    """Recompute the numbers of a report from the results of its sweep.

    A page that is not there, as those of published sweeps in this repository, is not compared.

    Raises:
        ConfigurationError: If there is no report at `path`.
        DamagedFileError: If the report or the plan cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / NUMBERS).exists():
        raise ConfigurationError(f"{path}: a report with {NUMBERS} beside it is expected; write one first")
    written = _read_numbers(folder / NUMBERS)
    about = written["page"] if isinstance(written.get("page"), dict) else {}
    page = path if path.suffix == ".html" else folder / Path(str(about.get("name"))).name
    if page == path and not os.path.lexists(page):
        raise ConfigurationError(f"{page}: there is no such page; write one first")
    assessment = load_assessment(folder / written["runs"])
    verification = Verification(assessment.sweep)
    # A hash says only that the files are as they were written
    if written.get(CHECKSUM) != checksum_of(written):
        verification.differences.append(
            f"{NUMBERS}: was changed after it was written: it has another checksum"
        )
    if os.path.lexists(page) and hashlib.sha256(read_bytes(page)).hexdigest() != about.get("sha256"):
        verification.differences.append(f"{page.name}: is not the page that {NUMBERS} was written with")
    _compare(written, numbers_of(assessment, sections_of(assessment, added)), verification, tuple(added))
    # A report can agree with files that are not those of its plan
    verification.differences += verification.sweep.invalid
    unread = [problem.text for problem in verification.sweep.problems if problem.unread]
    verification.not_compared += [text.partition(": ")[0] + ": it cannot be read" for text in unread]
    return verification


def _read_numbers(path: Path) -> dict[str, Any]:
    written = read_json(path)
    if not isinstance(written, dict) or written.get("schema") != NUMBERS_SCHEMA:
        raise DamagedFileError(f"{path}: not the numbers of a report that this version reads")
    if not isinstance(written.get("runs"), str):
        raise DamagedFileError(f"{path}: does not name the directory of its sweep")
    return written


def _compare(
    written: dict[str, Any], numbers: dict[str, Any], verification: Verification, added: tuple[Builder, ...]
) -> None:
    """Compare the numbers that are written with those of the results."""
    kept = {key: value for key, value in written.items() if key not in _APART}
    leaves = [*differences(kept, json.loads(json.dumps(numbers)))]
    lines, words = ([leaf.line for leaf in leaves if leaf.counts is whether] for whether in (True, False))
    then, now = written.get("code"), code_version(added)
    if then == now:
        verification.differences += [*lines, *words]
        return
    then = then if isinstance(then, dict) else {}
    by, here = (f"version {one.get('version')} ({str(one.get('sources'))[:12]})" for one in (then, now))
    other = f"the report was written by {by}, this is {here}"
    if lines:
        why = f"in numbers or verdicts: {other}, and either the code or the report changed"
        verification.differences += [f"{count(len(lines), 'difference')} {why}", *lines[:_LISTED]]
    if words:
        why = f"in words or fields: {other}"
        verification.not_compared += [f"{count(len(words), 'difference')} {why}", *words[:_LISTED]]
