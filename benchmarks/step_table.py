"""The page's tables of training steps, from the results of all machines."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import step
from .measure import DEVICE
from .step import FOLDER, WORKS, Work, ratio
from .step_case import SMOLLM2
from .table import markdown, number

# Stages of a rollout's cycle, whose reward costs nothing here
STAGES = "generate", "statistics", "update"


def report(key: str, quick: bool) -> str:
    """Measure a work, and keep the results."""
    found = step.measure(key, 1 if quick else step.ROUNDS)
    if found is None:
        return f"{key}: not measured, as {SMOLLM2} does not exist; `make chat` makes it"
    if not quick and DEVICE.type == "cpu":
        step.store(key, found)
    return f"{key}: {json.dumps(found)}"


def page(folder: Path = FOLDER) -> str:
    """All machines side by side, and a table of each."""
    machines = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join([_side_by_side(machines), *map(_machine, machines)])


def _side_by_side(machines: list[dict[str, Any]]) -> str:
    found = [machine["works"] for machine in machines]
    rows = []
    peaks = [*map(_peaks, found)]
    for precision in sorted({precision for peak in peaks for precision in peak}):
        cells = [f"{peak[precision] / 1e9:.0f}" if precision in peak else "–" for peak in peaks]
        rows.append([f"fastest product of matrices, GFLOP/s, {precision}", "", *cells])
    for key, work in WORKS.items():
        cells = [ratio(works[key]) if key in works else "–" for works in found]
        rows.append([work.title, _goal(work), *cells])
    return markdown(["ours / other", "goal", *(machine["processor"] for machine in machines)], rows)


def _peaks(works: Mapping[str, Any]) -> dict[str, float]:
    """The fastest product of matrices that was measured beside any work, by precision."""
    peaks: dict[str, float] = {}
    for found in works.values():
        peaks[found["precision"]] = max(found["peak"], peaks.get(found["precision"], 0.0))
    return peaks


def _goal(work: Work) -> str:
    return f"{work.goal:.2f}".removeprefix("0")


def _machine(machine: Mapping[str, Any]) -> str:
    works, peaks = machine["works"], _peaks(machine["works"])
    rows = [_row(key, works[key], peaks[works[key]["precision"]]) for key in WORKS if key in works]
    header = ["work", "ours, s", "other, s", "ratio", "of peak", "other", "products alone"]
    header += ["generate, statistics, update", "MB", "other", "load"]
    softwares = sorted({found["software"] for found in works.values()})
    return f"### {machine['processor']}\n\n{'; '.join(softwares)}.\n\n" + markdown(header, rows)


def _row(key: str, found: Mapping[str, Any], peak: float) -> list[str]:
    work, megabytes = WORKS[key], [number(value) for value in found["megabytes"]]
    seconds = [statistics.median(found[which]) for which in ("ours", "other")]
    spent = [*seconds, found["products"]] if "products" in found else seconds
    of_peak = [f"{found['operations'] / peak / each:.0%}" for each in spent]
    of_peak += ["–"] * (3 - len(of_peak))
    shares = ", ".join(f"{found['shares'][s]:.0%}" for s in STAGES if s in found["shares"]) or "–"
    times = [number(value) for value in seconds]
    return [work.title, *times, ratio(found), *of_peak, shares, *megabytes, f"{found['load']:.1f}"]
