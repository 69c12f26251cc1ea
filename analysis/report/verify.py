"""Recomputes a written report and says where it differs from what the results give."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.report.build import HTML, NUMBERS, compose
from lit_klrb.errors import ConfigurationError

_DRAWING = re.compile(r'src="data:image/svg\+xml,[^"]*"')


def verify(path: Path) -> list[str]:
    """Recompute a report from the results it was made from.

    Args:
        path: The page, its `results.json`, or the directory they are in.

    Returns:
        One line for each difference; empty if page and numbers are what the results give. Numbers may differ
        by 1e-9 of themselves, and drawings are compared only under the versions that made them.

    Raises:
        ConfigurationError: If there is no report at `path`.
    """
    folder = path if path.is_dir() else path.parent
    page = path if path.suffix == ".html" else folder / HTML
    if not page.exists() or not (folder / NUMBERS).exists():
        raise ConfigurationError(f"{path}: a report with {NUMBERS} beside it is expected; write one first")
    written = json.loads((folder / NUMBERS).read_text("utf-8"))
    html, numbers = compose(folder / written["runs"], folder)
    expected = json.loads(numbers)
    found = [f"{NUMBERS}: {line}" for line in _differences(written, expected)]
    same_engines = written.get("engines") == expected["engines"]
    return found + _page_differences(page, html, drawings=same_engines)


def _differences(written: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Leaves in which two JSON documents differ, but for rounding and the engines' versions."""
    if isinstance(written, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*written, *expected)):
            if key != "engines":
                yield from _differences(
                    written.get(key), expected.get(key), f"{place}.{key}" if place else key
                )
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for index, pair in enumerate(zip(written, expected, strict=True)):
            yield from _differences(*pair, f"{place}[{index}]")
    elif not _equal(written, expected):
        yield f"{place}: {json.dumps(written)} is written, the results give {json.dumps(expected)}"


def _equal(written: Any, expected: Any) -> bool:
    if isinstance(written, float) and isinstance(expected, float):
        return math.isclose(written, expected, rel_tol=1e-9, abs_tol=1e-12)
    return bool(written == expected)


def _page_differences(page: Path, html: str, *, drawings: bool) -> list[str]:
    written, expected = page.read_text("utf-8").splitlines(), html.splitlines()
    if not drawings:
        written, expected = ([_DRAWING.sub("", line) for line in lines] for lines in (written, expected))
    if len(written) != len(expected):
        return [f"{page.name}: {len(written)} lines are written, the results give {len(expected)}"]
    return [
        f"{page.name}: line {number}: {_short(ours)} is written, the results give {_short(theirs)}"
        for number, (ours, theirs) in enumerate(zip(written, expected, strict=True), start=1)
        if ours != theirs
    ]


def _short(line: str, width: int = 120) -> str:
    return repr(line if len(line) <= width else f"{line[:width]}…")
