"""The locked plan: what was decided before the results, and every change made since."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.design import Expansion, Plan
from analysis.design.fingerprint import digest
from analysis.results import files
from analysis.sweep.changes import changes
from analysis.sweep.store import DamagedFileError, Store

PLAN = "plan.json"


def lock(plan: Plan, expansion: Expansion, store: Store) -> list[str]:
    """Write the plan, under its hash, into the sweep's directory; a change to a locked one is recorded.

    The file holds `content` (plan, configurations, code and versions), its `hash`, the `cells` it expands
    to, and the `history`: for each version of the content its hash, what changed, and how many of the
    directory's cells had a result when it was locked, that is, how much could have been seen.

    Returns:
        What changed since the plan was last locked, one line a key; empty for a new or unchanged plan.

    Raises:
        DamagedFileError: If the locked plan was edited by hand.
    """
    path = store.directory / PLAN
    design = asdict(plan)
    # Moving a sweep does not change it.
    del design["directory"]
    content = json.loads(json.dumps({"plan": design, **expansion.content}))
    locked = _read(path)
    if locked and locked["content"] == content:
        return []
    altered = list(changes(locked["content"], content)) if locked else []
    version = {"hash": digest(content), "published": store.count(), "changes": altered}
    document = {
        "schema": 1,
        "hash": version["hash"],
        "content": content,
        "cells": [{"id": cell.id, **cell.record()} for cell in expansion.cells],
        "history": [*(locked["history"] if locked else ()), version],
    }
    files.replace(path, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n")
    return altered


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        intact = digest(document["content"]) == document["hash"] == document["history"][-1]["hash"]
    except (ValueError, KeyError, TypeError, IndexError):
        intact = False
    if not intact:
        raise DamagedFileError(
            f"{path}: does not match its hash; change the plan file, never the locked plan"
        )
    return document
