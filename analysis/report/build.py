"""Writes the report: the page, and its numbers beside it."""

import json
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis.report.assessment import load_study
from analysis.report.html import render
from analysis.report.sections import SECTIONS

HTML = "report.html"
NUMBERS = "results.json"
# What can move the last digit of a number or a coordinate of a drawing.
_ENGINES = ("numpy", "scipy", "statsmodels", "moocore", "matplotlib")


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
    html, numbers = compose(runs_dir, output.parent)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html, encoding="utf-8")
    (output.parent / NUMBERS).write_text(numbers, encoding="utf-8")
    return output


def compose(runs_dir: Path, folder: Path) -> tuple[str, str]:
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
