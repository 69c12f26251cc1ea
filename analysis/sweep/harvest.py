"""From a finished run directory to the result that is published."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from analysis.results import Cell
from analysis.results.layout import RESULT_SCHEMA
from lit_klrb import schema

# What counts as a curve; other columns, such as speed, differ from run to run and are no result.
_CURVES = ("train/", "val/")
# Sections of the configuration that hold hyperparameters, and those of the trainer's keys that are one.
_SETTINGS = ("model", "data", "kl")
_TRAINER_SETTINGS = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
# Completions that are kept of each run, and letters of each.
_COMPLETIONS, _LETTERS = 3, 1_000


def harvest(cell: Cell, run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """The result of a finished run, without its checksum: the same bytes however often it is run.

    Numbers that are not finite become None. A run whose final reward or KL is not finite has diverged,
    whatever its summary says: no statistic may rank it as if it had a value.

    Args:
        cell: The cell.
        run: Its run directory.
        summary: What `read_summary` found there.
    """
    state = summary["state"]
    final = {name: _finite(value) for name, value in summary["final"].items()}
    if any(final.get(name, 0.0) is None for name in (schema.REWARD, schema.KL)):
        state = schema.DIVERGED
    studies = {path.stem: json.loads(path.read_bytes()) for path in (run / schema.STUDIES).glob("*.json")}
    shown = completions(run / schema.COMPLETIONS)
    return {
        "schema": RESULT_SCHEMA,
        "id": cell.id,
        "cell": cell.record(),
        "state": state,
        "final": final,
        "curves": curves(run / schema.METRICS_DIR),
        "versions": summary["versions"],
        **{key: summary[key] for key in (schema.WEIGHTS,) if key in summary},
        **({"studies": studies} if studies else {}),
        **({"completions": shown} if shown else {}),
        "settings": settings(run / schema.CONFIG),
    }


def read_summary(run: Path) -> dict[str, Any] | None:
    """How the run says it ended; None if it did not come to an end.

    Raises:
        ValueError: If it names a state that is none.
    """
    path = run / schema.SUMMARY
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_bytes())
    if summary["state"] not in (schema.DONE, schema.DIVERGED):
        raise ValueError(f"{path}: state {summary['state']!r} is neither {schema.DONE} nor {schema.DIVERGED}")
    return summary


def curves(metrics: Path) -> dict[str, dict[str, list[Any]]]:
    """The training curves of a run, stitched from the files of its attempts.

    A later attempt continues from a checkpoint: from the first step it logged of a curve, it replaces what
    the attempts before it wrote.

    Returns:
        Metric -> {"step": increasing integers, "value": floats, or None where not finite}.
    """
    stitched: dict[str, dict[int, float | None]] = {}
    for path in sorted(metrics.rglob("*.csv"), key=_attempt):
        with path.open(newline="") as file:
            text = file.read()
        # A line without an end was torn when the machine stopped: what is left of a number is another number.
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


def completions(folder: Path) -> list[dict[str, Any]]:
    """A few completions of the newest evaluation beside those of the first; none without a table of them."""
    tables = sorted(folder.glob("step_*.csv"))
    if not tables:
        return []
    with tables[-1].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:_COMPLETIONS]
    return [
        {
            **{name: row[name][:_LETTERS] for name in ("text_at_start", "text")},
            **{name: _finite(float(row[name])) for name in ("reward_at_start", "reward")},
        }
        for row in rows
    ]


def settings(config: Path) -> dict[str, Any]:
    """The hyperparameters of a run: dotted key -> value, without nulls and local paths."""
    if not config.exists():
        return {}
    content = yaml.safe_load(config.read_text("utf-8"))
    kept = {name: content.get(name) for name in _SETTINGS}
    kept["trainer"] = {name: (content.get("trainer") or {}).get(name) for name in _TRAINER_SETTINGS}
    return {
        key.replace("init_args.", ""): value
        for key, value in _leaves(kept)
        if value is not None and not str(value).startswith(("/", "~", "."))
    }


def _leaves(content: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}.")
        elif isinstance(value, str | int | float | None):
            yield f"{before}{name}", value


def _attempt(path: Path) -> int:
    found = re.findall(r"attempt_(\d+)", str(path))
    if not found:
        raise ValueError(f"{path}: no attempt_N in its name says which attempt wrote it")
    return int(found[-1])


def _read_curves(rows: Iterable[dict[str, str]]) -> dict[str, dict[int, float | None]]:
    points: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_CURVES) and value:
                points.setdefault(name, {})[int(row[schema.STEP])] = _finite(float(value))
    return points


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
