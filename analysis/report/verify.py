"""Recomputes a report and lists the differences.

The comparison depends on the code that wrote the report. The same code with the same libraries gives the same
bytes. With other versions of the libraries, drawings may differ; with other code, statistics and text may
differ too. Then only the plan, the results and each run's outcome are compared, and the rest is listed.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.report.assessment import load_assessment
from analysis.report.build import code_version, compose, engines
from analysis.report.sections import Builder
from analysis.results.files import DamagedFileError, read_bytes, read_json
from analysis.results.layout import NUMBERS, NUMBERS_SCHEMA, PLAN, PLAN_SCHEMA, REPORT
from analysis.results.load import load_sweep
from analysis.results.sweep import Sweep
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

_DRAWING = re.compile(r'src="data:image/svg\+xml,[^"]*"')
# Keys of the document that are compared separately.
_APART = ("engines", "code", "page")


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

    A page that is not there, as those of published sweeps in this repository, is composed again: it should be
    the page whose hash `results.json` records.

    Args:
        path: The page, its `results.json`, or the directory they are in.
        added: Sections of other packages that it may have, see `build`.

    Raises:
        ConfigurationError: If there is no report at `path`.
        DamagedFileError: If the report or the plan cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / NUMBERS).exists():
        raise ConfigurationError(f"{path}: a report with {NUMBERS} beside it is expected; write one first")
    written = _read_numbers(folder / NUMBERS)
    name = _at(written, "page", "name")
    page = path if path.suffix == ".html" else folder / (Path(name).name if isinstance(name, str) else REPORT)
    if page == path and not os.path.lexists(page):
        raise ConfigurationError(f"{page}: there is no such page; write one first")
    runs = folder / written["runs"]
    code = code_version(tuple(added))
    if written.get("code") == code:
        found = _recompute(written, runs, page, added)
    else:
        found = _compare_facts(written, runs, code)
    _check_plan(found)
    # A page can agree with files that are not those of its plan
    found.differences += found.sweep.invalid
    unread = [problem.text for problem in found.sweep.problems if problem.unread]
    found.not_compared += [text.partition(": ")[0] + ": it cannot be read" for text in unread]
    recorded = _at(written, "page", "sha256")
    if recorded is None:
        found.not_compared.append(f"{page.name}: {NUMBERS} does not record the page it was written with")
    elif os.path.lexists(page) and hashlib.sha256(read_bytes(page)).hexdigest() != recorded:
        found.differences.append(f"{page.name}: is not the page that {NUMBERS} was written with")
    return found


def _read_numbers(path: Path) -> dict[str, Any]:
    written = read_json(path)
    if not isinstance(written, dict) or written.get("schema") not in (1, NUMBERS_SCHEMA):
        raise DamagedFileError(f"{path}: not the numbers of a report that this version reads")
    if not isinstance(written.get("runs"), str):
        raise DamagedFileError(f"{path}: does not name the directory of its sweep")
    return written


def _check_plan(found: Verification) -> None:
    locked = found.sweep.locked
    if locked is None:
        found.not_compared.append(f"{PLAN}: there is none; the design was inferred from the results")
    elif locked.schema != PLAN_SCHEMA:
        found.not_compared.append(
            f"{PLAN}: locked by an earlier version (schema {locked.schema}), whose hash covers neither its "
            "cells nor its history"
        )


def _recompute(written: dict[str, Any], runs: Path, page: Path, added: Sequence[Builder]) -> Verification:
    """Compare everything: the code that wrote the report is this code."""
    assessment = load_assessment(runs)
    report = compose(assessment, page, added)
    expected = json.loads(json.dumps(report.numbers))
    found = Verification(assessment.sweep)
    found.differences += [f"{NUMBERS}: {line}" for line in _differences(written, expected)]
    drawings = written.get("engines") == engines()
    if not drawings:
        found.not_compared.append(
            f"{page.name}: its drawings, which were made under {_versions(written.get('engines'))}"
        )
    if os.path.lexists(page):
        found.differences += _of_page(page, report.page, drawings)
    elif drawings and hashlib.sha256(report.page).hexdigest() != _at(written, "page", "sha256"):
        found.differences.append(f"{page.name}: the results do not give the page of {NUMBERS}'s hash")
    return found


def _of_page(page: Path, expected: bytes, drawings: bool) -> list[str]:
    """The lines in which a page differs, with its drawings or without."""
    raw = read_bytes(page)
    written, given = (
        [line if drawings else _DRAWING.sub("", line) for line in text.splitlines()]
        for text in (raw.decode(errors="replace"), expected.decode())
    )
    if len(written) != len(given):
        return [f"{page.name}: {len(written)} lines are written, the results give {len(given)}"]
    changed = [
        f"{page.name}: line {line}: {_short(repr(ours))} is written, the results give {_short(repr(theirs))}"
        for line, (ours, theirs) in enumerate(zip(written, given, strict=True), start=1)
        if ours != theirs
    ]
    if drawings and raw != expected and not changed:
        return [f"{page.name}: its bytes are not those that the results give"]
    return changed


def _versions(written: Any) -> str:
    """Names and versions of the libraries whose version differs."""
    if not isinstance(written, dict):
        return "unknown versions"
    now = engines()
    other = [name for name in now if written.get(name) != now[name]]
    return ", ".join(f"{name} {written.get(name)} (here {now[name]})" for name in other)


def _compare_facts(written: dict[str, Any], runs: Path, code: dict[str, str]) -> Verification:
    """Compare what does not depend on the code: the plan, the results and each run's outcome."""
    sweep = load_sweep(runs)
    found = Verification(sweep)
    found.not_compared.append(
        f"statistics, words and drawings: the report was written by {_code(written.get('code'))}, this is "
        f"{_code(code)}; the plan, the results and each run's outcome were compared"
    )
    said, facts = _said(written), _facts(sweep)
    times = _at(written, "sections", "equal_time", "seconds")
    if isinstance(times, dict):
        said["sections.equal_time.seconds"], facts["sections.equal_time.seconds"] = times, {**sweep.seconds}
    found.differences += [f"{NUMBERS}: {line}" for line in _differences(said, facts)]
    return found


def _code(code: Any) -> str:
    if not isinstance(code, dict):
        return "a version that did not record itself"
    return f"version {code.get('version')} ({str(code.get('sources'))[:12]})"


def _facts(sweep: Sweep) -> dict[str, Any]:
    return {
        "plan.hash": sweep.locked and sweep.locked.hash,
        "provenance.results": {run.cell.id: run.checksum for run in sweep.runs},
        "tradeoff.runs": {
            run.cell.id: {key: _number(run.outcome(key)) for key in (schema.REWARD, schema.KL)}
            for run in sweep.grid.values()
            if not run.diverged
        },
    }


def _number(value: float) -> float | None:
    """A number as in JSON, where NaN (a void reward) is null."""
    return value if math.isfinite(value) else None


def _said(written: dict[str, Any]) -> dict[str, Any]:
    """The content of `_facts`, taken from the numbers of a report."""
    plan = written.get("plan")
    runs = _at(written, "sections", "tradeoff", "runs")
    outcomes = {
        name: {key: _at(run, key) for key in (schema.REWARD, schema.KL)}
        for name, run in (runs if isinstance(runs, dict) else {}).items()
    }
    return {
        "plan.hash": plan if isinstance(plan, str) else _at(plan, "hash"),
        "provenance.results": _at(written, "sections", "provenance", "results"),
        "tradeoff.runs": outcomes,
    }


def _at(value: Any, *keys: str) -> Any:
    """The value of a document at a path of keys; None if it does not exist."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _differences(written: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Yield the leaves in which two JSON documents differ by more than rounding."""
    if isinstance(written, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*written, *expected)):
            if place or key not in _APART:
                yield from _differences(
                    written.get(key), expected.get(key), f"{place}.{key}" if place else key
                )
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for index, pair in enumerate(zip(written, expected, strict=True)):
            yield from _differences(*pair, f"{place}[{index}]")
    elif written != expected and not (
        isinstance(written, float)
        and isinstance(expected, float)
        and math.isclose(written, expected, rel_tol=1e-9, abs_tol=1e-12)
    ):
        ours, theirs = (_short(json.dumps(value)) for value in (written, expected))
        yield f"{place}: {ours} is written, the results give {theirs}"


def _short(text: str, width: int = 120) -> str:
    return text if len(text) <= width else f"{text[:width]}…"
