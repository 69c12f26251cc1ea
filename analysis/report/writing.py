"""Writes the report, and recomputes it to check one that was written."""

import json
import math
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis.report.page import render
from analysis.report.sections import SECTIONS
from analysis.report.study import load_study
from lit_klrb.errors import ConfigurationError

HTML = "report.html"
NUMBERS = "results.json"
# What can move the last digit of a number or a coordinate of a drawing.
_ENGINES = ("numpy", "scipy", "statsmodels", "moocore", "matplotlib")
_DRAWING = re.compile(r'src="data:image/svg\+xml,[^"]*"')


def build(runs_dir: Path, output: Path | None = None) -> Path:
    """Write the report of a sweep and `results.json` beside it.

    Args:
        runs_dir: The sweep's directory, with `results/` and, if it was planned, `plan.json`.
        output: The page to write; `report.html` in the sweep's directory by default.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: If the directory holds no results, or the plan cannot be read.
    """
    output = runs_dir / HTML if output is None else output
    html, numbers = _compose(runs_dir, output.parent)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html, encoding="utf-8")
    (output.parent / NUMBERS).write_text(numbers, encoding="utf-8")
    return output


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
    html, numbers = _compose(folder / written["runs"], folder)
    expected = json.loads(numbers)
    found = [f"{NUMBERS}: {line}" for line in _differences(written, expected)]
    same_engines = written.get("engines") == expected["engines"]
    return found + _page_differences(page, html, drawings=same_engines)


def _compose(runs_dir: Path, folder: Path) -> tuple[str, str]:
    """The page and the text of `results.json` for a report in `folder`."""
    study = load_study(runs_dir)
    sections = [section for builder in SECTIONS if (section := builder(study)) is not None]
    numbers = {
        "schema": 1,
        "runs": os.path.relpath(runs_dir, folder),
        "plan": study.sweep.plan.digest,
        "engines": {name: version(name) for name in _ENGINES},
        "sections": {section.name: section.numbers for section in sections},
    }
    return render(study, sections), json.dumps(_plain(numbers), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON without NaN or infinities, which are no JSON: both become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


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
