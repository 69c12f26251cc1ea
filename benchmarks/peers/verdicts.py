"""The verdicts that are expected, as they are kept in the repository, and what differs from them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "verdicts.json"
# Numbers are of enumerated models and of seeded draws: they differ by rounding alone
TOLERANCE = 2e-3

Verdicts = dict[str, dict[str, Any]]  # by software: its source, and its losses by name


def read(file: Path) -> Verdicts:
    """The kept verdicts."""
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def write(verdicts: Mapping[str, Any], file: Path) -> None:
    """Keep verdicts, one loss a line."""
    lines = []
    for software, about in verdicts.items():
        head = {key: value for key, value in about.items() if key != "losses"}
        losses = [f"    {json.dumps(name)}: {json.dumps(loss)}" for name, loss in about["losses"].items()]
        text = json.dumps(head)[1:-1]
        lines.append(f'  {json.dumps(software)}: {{{text}, "losses": {{\n' + ",\n".join(losses) + "\n  }}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def differences(kept: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line for each loss of a software whose verdict is not the kept one, new or gone."""
    lines = []
    for name, loss in found["losses"].items():
        before = kept.get("losses", {}).get(name)
        if before is None:
            lines.append(f"{name}: new, {loss['gradient']}")
            continue
        changed = [key for key in {**before, **loss} if not _same(before.get(key), loss.get(key))]
        lines += [f"{name}: {key} was {before.get(key)}, is {loss.get(key)}" for key in changed]
    gone = [name for name in kept.get("losses", {}) if name not in found["losses"]]
    return lines + [f"{name}: gone" for name in gone]


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(before == after)
