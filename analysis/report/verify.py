"""Recomputes a report and lists the differences.

Numbers are compared within a tolerance, the page as text, and drawings up to what can be seen (`agreement`).
No byte of a page decides whether a result is honest: a hash says only that a file is as it was written.
What depends on the code (statistics, words, drawings) is compared always. If the report was written by other
code, differences in these are listed as not compared, as the code may have changed them.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.report.agreement import Printed, differences, line_differences, same_drawing
from analysis.report.assessment import load_assessment
from analysis.report.build import CHECKSUM, checksum_of, code_version, compose, engines
from analysis.report.sections import Builder
from analysis.results.layout import NUMBERS, NUMBERS_SCHEMA
from analysis.results.store import DamagedFileError, read_bytes, read_json
from analysis.results.sweep import Sweep
from analysis.stats.text import printed
from lit_klrb.errors import ConfigurationError

_DRAWING = re.compile(r'src="(data:image/svg\+xml,[^"]*)"')
# Keys of the document that are compared separately.
_APART = ("engines", "code", "page", CHECKSUM)
# Keys whose values come from plan and results without a computation.
_COPIED = (("plan", "hash"), ("runs",), ("sections", "provenance"), ("sections", "tradeoff", "runs"))
# Number of differences that are listed of a report by other code.
_LISTED = 20


@dataclass
class Verification:
    """The result of comparing a report with its sweep.

    Attributes:
        sweep: The sweep.
        differences: One line per difference, including what rules out a verdict.
        not_compared: What could not be compared, and why.
    """

    sweep: Sweep
    differences: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)


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
        f"{NUMBERS}: {line}"
        for keys, line in differences(ours, theirs, values)
        if not any(keys[: len(copied)] == copied for copied in _COPIED)
    ]
    for copied in _COPIED:
        one, other = (_at(document, *copied) for document in (ours, theirs))
        lines = differences(one, other, values, copied, copied=True)
        found.differences += [f"{NUMBERS}: {line}" for _, line in lines]
    if os.path.lexists(page):
        of_code += _of_page(written, page, content, values, found)
    code, now = written.get("code"), code_version(added)
    if code == now or not of_code:
        found.differences += of_code
        return
    more = f" (and {len(of_code) - _LISTED} more)" if len(of_code) > _LISTED else ""
    by, here = (f"version {_at(one, 'version')} ({str(_at(one, 'sources'))[:12]})" for one in (code, now))
    found.not_compared.append(
        f"{len(of_code)} numbers or lines{more}, which differ: the report was written by {by}, this is {here}"
    )
    found.not_compared += of_code[:_LISTED]


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
