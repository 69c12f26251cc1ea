"""Locks the plan of a sweep: from the first cell on, every change to it is recorded."""

import json
from pathlib import Path

from analysis.design import Expansion
from analysis.results import DamagedFileError, Plan, files, layout
from analysis.results.locked import LockedPlan, lock_document
from analysis.sweep.changes import changes
from lit_klrb.errors import ConfigurationError


def lock(plan: Plan, expansion: Expansion, directory: Path, *, record: bool) -> list[str]:
    """Write the plan, under its hash, into the sweep's directory.

    Before a cell has begun a new plan replaces the old one, and nothing is said of it. From then on a change
    is recorded in the history, with the number of results there were: how much could have been seen.

    Args:
        plan: The plan.
        expansion: Its cells, and what was hashed into their ids.
        directory: The sweep's directory.
        record: Whether a change is recorded; otherwise a plan under which cells have begun stays as it is.

    Returns:
        What differs from the plan that is locked, one line per key.

    Raises:
        DamagedFileError: If the locked plan was edited by hand.
        ConfigurationError: If it was locked by a version whose sweeps this one cannot continue.
    """
    path = directory / layout.PLAN
    begun = layout.has_begun(directory)
    before = LockedPlan.read(path) if begun and path.exists() else None
    content = json.loads(json.dumps({"plan": plan.record(), **expansion.content}))
    if before is None:
        _write(path, lock_document(plan, content, expansion.cells, published=_published(directory)))
        return []
    if not before.recomputed:
        raise DamagedFileError(
            f"{path}: does not match its hash; change the plan file, never the locked plan"
        )
    altered = list(changes(before.document["content"], content))
    if altered and before.schema != layout.PLAN_SCHEMA:
        raise ConfigurationError(
            f"{directory} holds a sweep that an earlier version locked (plan schema {before.schema}), which "
            "can be reported and verified but not continued; name another directory",
            key="directory",
        )
    if altered and record:
        document = lock_document(
            plan,
            content,
            expansion.cells,
            before=before,
            published=_published(directory),
            changes=altered,
        )
        _write(path, document)
    return altered


def _published(directory: Path) -> int:
    return len(layout.result_paths(directory))


def _write(path: Path, document: bytes) -> None:
    """Write the locked plan unless it is there already, byte for byte."""
    if not (path.exists() and path.read_bytes() == document):
        files.replace(path, document)
