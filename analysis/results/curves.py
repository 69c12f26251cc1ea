"""The curves of a run directory, combined from the metrics of its attempts."""

import csv
import math
import re
from pathlib import Path
from typing import Any

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError, refusing

# Prefixes of metrics that are published; others, such as speed, differ between repetitions of a run.
_CURVES = ("train/", "val/")
# Significant digits of what is published; float32 has seven.
_DIGITS = 6


def curves(metrics: Path) -> dict[str, dict[str, list[Any]]]:
    """The curves of a run, combined from the files of its attempts.

    A later attempt continues from a checkpoint: from the first step at which it logs a curve, its values
    replace those of earlier attempts.

    Returns:
        Metric -> {"step": increasing integers, "value": floats of six digits, or None where not finite}.
    """
    stitched: dict[str, dict[int, float | None]] = {}
    for path in sorted(metrics.rglob("*.csv"), key=_attempt):
        with refusing(f"{path} is damaged"):
            attempt = _points(path.read_text("utf-8"))
        for name, points in attempt.items():
            first, earlier = min(points), stitched.get(name, {}).items()
            stitched[name] = {step: value for step, value in earlier if step < first} | points
    return {
        name: {"step": sorted(points), "value": [points[step] for step in sorted(points)]}
        for name, points in sorted(stitched.items())
    }


def _points(text: str) -> dict[str, dict[int, float | None]]:
    """The curves of one attempt: metric -> step -> value."""
    # An incomplete last line, from a machine that stopped, may end in a truncated number: drop it
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines(keepends=True))
    curves: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_CURVES) and value:
                rounded = float(f"{float(value):.{_DIGITS}g}")
                points = curves.setdefault(name, {})
                points[int(row[schema.STEP])] = rounded if math.isfinite(rounded) else None
    return curves


def last_completions(run: Path) -> list[dict[str, str]]:
    """The rows of the latest table of completions of a run; empty without one."""
    tables = sorted((run / schema.COMPLETIONS).glob("step_*.csv"))
    if not tables:
        return []
    with refusing(f"{tables[-1]} is damaged"), tables[-1].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
        if not all({"text_at_start", "text"} <= row.keys() and None not in row.values() for row in rows):
            raise ValueError("a row lacks a text")
        return rows


def _attempt(path: Path) -> int:
    numbers = re.findall(r"attempt_(\d+)", str(path))
    if not numbers:
        raise ConfigurationError(f"{path}: must have the number of its attempt, attempt_N, in its path")
    return int(numbers[-1])
