"""The curves of a run directory, combined from the metrics of its attempts."""

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_klrb import schema

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
        with path.open(newline="") as file:
            text = file.read()
        # An incomplete last line, from a machine that stopped, may end in a truncated number: drop it
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        attempt = _read_curves(csv.DictReader(lines))
        for name, points in attempt.items():
            first = min(points)
            before = {step: value for step, value in stitched.get(name, {}).items() if step < first}
            stitched[name] = before | points
    return {
        name: {"step": sorted(points), "value": [points[step] for step in sorted(points)]}
        for name, points in sorted(stitched.items())
    }


def last_completions(run: Path) -> list[dict[str, str]]:
    """The rows of the latest table of completions of a run; empty without one."""
    tables = sorted((run / schema.COMPLETIONS).glob("step_*.csv"))
    if not tables:
        return []
    with tables[-1].open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _attempt(path: Path) -> int:
    found = re.findall(r"attempt_(\d+)", str(path))
    if not found:
        raise ValueError(f"{path}: must have the number of its attempt, attempt_N, in its path")
    return int(found[-1])


def _read_curves(rows: Iterable[dict[str, str]]) -> dict[str, dict[int, float | None]]:
    points: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_CURVES) and value:
                rounded = float(f"{float(value):.{_DIGITS}g}")
                points.setdefault(name, {})[int(row[schema.STEP])] = (
                    rounded if math.isfinite(rounded) else None
                )
    return points
