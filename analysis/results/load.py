"""Reads a sweep's directory: published results, failures and the locked plan, checked before use.

RUNS/plan.json               the locked plan
RUNS/results/<id>.json       one finished cell, immutable, with a checksum
RUNS/failed/<id>.json        one cell that the machinery could not run
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import rfc8785

from analysis.results.sweep import Cell, Curve, Failure, Plan, Run, Sweep
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

RESULT_SCHEMA = 1
Record = TypeVar("Record", Run, Failure)


def load_sweep(directory: Path) -> Sweep:
    """Read a run directory; files that fail a check are left out and named in `problems`.

    Args:
        directory: The sweep's directory, with a `results` folder.

    Raises:
        ConfigurationError: If there is no result to read.
    """
    paths = sorted((directory / "results").glob("*.json"))
    if not paths:
        raise ConfigurationError(f"{directory}: no results/*.json; the directory of a sweep is expected")
    runs, problems = _read_all(paths, _read_run)
    failures, failure_problems = _read_all(sorted((directory / "failed").glob("*.json")), _read_failure)
    plan = _read_plan(directory / "plan.json", [run.cell for run in runs])
    runs, duplicates = _drop_duplicates(runs, plan)
    order = {point: i for i, point in enumerate(plan.points)}
    published = {run.cell.id for run in runs}
    return Sweep(
        directory,
        plan,
        tuple(sorted(runs, key=lambda run: (order.get(run.cell.point or ("", 0, 0), -1), run.cell.id))),
        tuple(failure for failure in failures if failure.cell.id not in published),
        tuple(problems + failure_problems + duplicates),
    )


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the RFC 8785 canonical JSON of everything but the checksum itself."""
    return hashlib.sha256(rfc8785.dumps({k: v for k, v in content.items() if k != "checksum"})).hexdigest()


def _read_all(paths: Sequence[Path], read: Callable[[Path], Record]) -> tuple[list[Record], list[str]]:
    found: list[Record] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(read(path))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            rfc8785.CanonicalizationError,
        ) as error:
            problems.append(f"{path.parent.name}/{path.name}: {type(error).__name__}: {error}")
    return found, problems


def _read_run(path: Path) -> Run:
    content = json.loads(path.read_text())
    if content["schema"] != RESULT_SCHEMA:
        raise ValueError(f"schema {content['schema']!r}, expected {RESULT_SCHEMA}")
    if content["checksum"] != checksum(content):
        raise ValueError(
            "the content does not match its checksum: the file was changed after it was published"
        )
    cell = _cell(content, path)
    final = {key: _number(value) for key, value in (content.get("final") or {}).items()}
    finite = all(math.isfinite(final.get(key, math.nan)) for key in (schema.REWARD, schema.KL))
    if content["state"] not in (schema.DONE, schema.DIVERGED):
        raise ValueError(f"state {content['state']!r}, expected {schema.DONE!r} or {schema.DIVERGED!r}")
    curves = {
        key: Curve(
            np.array([_number(x) for x in curve["step"]]), np.array([_number(x) for x in curve["value"]])
        )
        for key, curve in (content.get("curves") or {}).items()
    }
    return Run(
        cell,
        content["state"] == schema.DIVERGED or (cell.point is not None and not finite),
        final,
        curves,
        {str(key): str(value) for key, value in (content.get("versions") or {}).items()},
        content["checksum"],
        content.get("studies") or {},
    )


def _read_failure(path: Path) -> Failure:
    content = json.loads(path.read_text())
    return Failure(
        _cell(content, path), int(content.get("attempts", 1)), str(content.get("error", "unknown"))
    )


def _cell(content: Mapping[str, Any], path: Path) -> Cell:
    if content["id"] != path.stem:
        raise ValueError(f"holds the cell {content['id']!r}")
    cell = content["cell"]
    return Cell(
        content["id"],
        cell["stage"],
        cell.get("estimator"),
        cell.get("beta"),
        cell.get("beta_index"),
        cell.get("replicate"),
        cell.get("seed"),
        tuple(cell.get("needs") or ()),
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _read_plan(path: Path, cells: Iterable[Cell]) -> Plan:
    if not path.exists():
        return _inferred_plan(cells)
    try:
        content = json.loads(path.read_text())
        body = content["content"]["plan"]
        grid, primary = body["grid"], body.get("primary", {})
        estimators = tuple(grid["estimator"])
        return Plan(
            name=body.get("name", path.parent.name),
            setting=body.get("setting", ""),
            estimators=estimators,
            betas={int(level): float(beta) for level, beta in grid["beta"].items()},
            replicates=int(grid["replicates"]),
            control=primary.get("control", _default_control(estimators)),
            alpha=float(primary.get("alpha", 0.05)),
            margins=dict(primary.get("margins", {})),
            cuts=tuple(primary.get("kl_cuts", ())),
            corner=tuple(primary.get("corner", ())) or None,
            sequential=bool(primary.get("sequential", False)),
            ids=frozenset(cell["id"] for cell in content["cells"]),
            digest=content["hash"],
            history=tuple(content.get("history", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path}: not a locked plan ({type(error).__name__}: {error})") from None


def _inferred_plan(cells: Iterable[Cell]) -> Plan:
    grid = [cell for cell in cells if cell.point is not None]
    estimators = tuple(sorted({str(cell.estimator) for cell in grid}))
    return Plan(
        name="sweep without a plan",
        estimators=estimators,
        betas={int(c.level or 0): float(c.beta or 0.0) for c in sorted(grid, key=lambda c: c.level or 0)},
        replicates=1 + max((int(cell.replicate or 0) for cell in grid), default=-1),
        control=_default_control(estimators),
    )


def _default_control(estimators: Sequence[str]) -> str:
    return "MonteCarlo" if "MonteCarlo" in estimators else next(iter(estimators), "")


def _drop_duplicates(runs: list[Run], plan: Plan) -> tuple[list[Run], list[str]]:
    """Keep one result for each point: the planned one. Any other choice is selection: none is kept."""
    groups: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.cell.point or run.cell.stage].append(run)
    kept, problems = [], []
    for group in groups.values():
        planned = [run for run in group if run.cell.id in plan.ids]
        chosen = group if len(group) == 1 else planned
        if len(chosen) == 1:
            kept.append(chosen[0])
            continue
        names = ", ".join(f"results/{run.cell.id}.json" for run in group)
        problems.append(f"{names}: {len(group)} results for {group[0].cell} and no plan says which counts")
    return kept, problems
