"""Collects the result of a finished run directory for publication."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import yaml

from analysis.results import Cell
from analysis.results.curves import curves, last_completions
from analysis.results.layout import RESULT_SCHEMA
from analysis.results.plan import flat
from analysis.results.settings import LOCAL_PATHS, SECTIONS, TRAINER
from lit_klrb import schema

# Number of completions published per run, and the maximum number of characters of each.
_COMPLETIONS, _LETTERS = 5, 1_000
# Columns of the final evaluation that are published, and their significant digits.
_PROMPT_VALUES, _DIGITS = (schema.REWARD, schema.KL), 4


def harvest(cell: Cell, run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """The result of a finished run, without its checksum; identical for every repetition of the run.

    Numbers that are not finite become None. A run whose final reward or KL is not finite counts as diverged,
    regardless of its summary, so that no statistic uses such a value.
    """
    state = summary["state"]
    final = {name: _finite(value) for name, value in summary["final"].items()}
    if any(final.get(name, 0.0) is None for name in (schema.REWARD, schema.KL)):
        state = schema.DIVERGED
    studies = {path.stem: json.loads(path.read_bytes()) for path in (run / schema.STUDIES).glob("*.json")}
    shown = completions(run)
    prompts = {} if state == schema.DIVERGED else prompt_values(run / schema.EVALUATION)
    return {
        "schema": RESULT_SCHEMA,
        "id": cell.id,
        "cell": cell.record(),
        "state": state,
        "final": final,
        "curves": curves(run / schema.METRICS_DIR),
        "versions": summary["versions"],
        **{key: summary[key] for key in (schema.WEIGHTS, schema.ROWS) if key in summary},
        **({"studies": studies} if studies else {}),
        **({"completions": shown} if shown else {}),
        **({"prompts": prompts} if prompts else {}),
        "settings": settings(run / schema.CONFIG),
    }


def read_summary(run: Path) -> dict[str, Any] | None:
    """Read the summary of a run; None if the run did not end.

    Raises:
        ValueError: If its state is unknown.
    """
    path = run / schema.SUMMARY
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_bytes())
    if summary["state"] not in (schema.DONE, schema.DIVERGED):
        raise ValueError(f"{path}: state {summary['state']!r} is neither {schema.DONE} nor {schema.DIVERGED}")
    return summary


def completions(run: Path) -> list[dict[str, Any]]:
    """A few completions of the latest and the first evaluation; empty without a table of completions."""
    return [
        {
            **{name: row[name][:_LETTERS] for name in ("text_at_start", "text")},
            **{name: _finite(float(row[name])) for name in ("reward_at_start", "reward")},
        }
        for row in last_completions(run)[:_COMPLETIONS]
    ]


def prompt_values(path: Path) -> dict[str, list[float]]:
    """Reward and KL of each prompt of the final evaluation, rounded; empty without its file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(f"{float(row[name]):.{_DIGITS}g}") for row in rows] for name in _PROMPT_VALUES}


def settings(config: Path) -> dict[str, Any]:
    """The hyperparameters of a run: dotted key -> value, without nulls and local paths."""
    if not config.exists():
        return {}
    content = yaml.safe_load(config.read_text("utf-8"))
    kept = {name: content.get(name) for name in SECTIONS}
    kept["trainer"] = {name: (content.get("trainer") or {}).get(name) for name in TRAINER}
    return {
        key.replace("init_args.", ""): value
        for key, value in flat(kept)
        if isinstance(value, str | int | float) and not str(value).startswith(LOCAL_PATHS)
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
