"""Locks the plan of a sweep: once a cell has started, every change is recorded."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from analysis.design import Expansion
from analysis.design.examination import examine
from analysis.design.rates import choice_of
from analysis.results import DamagedFileError, Plan, layout
from analysis.results.locked import ARMS, CHOICE, LockedPlan, encode_plan, lock_document, trials_of
from analysis.results.records import Arm, read_run
from analysis.results.store import archive_path
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import one_at_a_time, write_atomically


def lock(
    plan: Plan,
    expansion: Expansion,
    directory: Path,
    *,
    record: bool,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[list[str], Mapping[str, Arm]]:
    """Write the plan with its hash to the sweep's directory.

    Before a cell has started, a new plan replaces the old one without a record. From then on, changes are
    recorded in the history, with the number of results that could have been seen. `meanwhile` is called
    before the arms are examined, which takes seconds.

    Returns:
        Differences from the locked plan, one line per key, and the properties of each arm by label.

    Raises:
        DamagedFileError: If the locked plan was edited by hand.
        ConfigurationError: If a stage or an arm is invalid, or the directory has a published sweep, which
            cannot be continued.
    """
    path, archive = directory / layout.PLAN, archive_path(directory)
    if archive.exists():
        raise ConfigurationError(
            f"{directory} contains a published sweep ({archive.name}), which can be reported and verified "
            "but not continued; name another directory",
            key="directory",
        )
    content = json.loads(json.dumps({"plan": plan.record(), **expansion.content}))
    before = _locked(path, begun=_has_begun(directory))
    if before and ARMS in before.document["content"] and not _altered(before, plan, content):
        arms = before.arms
    else:
        meanwhile()
        arms = examine(plan, expansion.cells)
    content[ARMS] = {label: asdict(arm) for label, arm in arms.items()}
    directory.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(directory):
        # Read again: while the arms were examined, another sweep may have locked the plan and begun
        begun, published = _has_begun(directory), len(layout.result_paths(directory))
        before = _locked(path, begun=begun)
        altered = _altered(before, plan, content) if before and begun else []
        if not begun or before is None or (altered and record):
            document = lock_document(
                plan,
                content,
                expansion.cells,
                before=before if begun else None,
                published=published,
                changes=altered,
                moment=_moment(),
            )
            if before is None or before.hash != document["hash"]:
                write_atomically(path, encode_plan(document))
    return altered, arms


def _moment() -> dict[str, str | None]:
    """The time, and the commit of the working directory, with `-dirty` if files have changed since."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return {"time": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit or None}


def _has_begun(directory: Path) -> bool:
    """Whether a cell of a sweep has started."""
    return any(any((directory / name).glob("*")) for name in (layout.RESULTS, layout.FAILED, layout.CELLS))


def _altered(before: LockedPlan, plan: Plan, content: Mapping[str, Any]) -> list[str]:
    """Differences of a plan from the locked one, one line per key; arms' properties follow from the rest."""
    altered = list(changes({**before.document["content"], ARMS: None}, {**content, ARMS: None}))
    was, blocks = [*before.plan.grid.blocks], [*plan.grid.blocks]
    if was != blocks and {*was} == {*blocks}:  # replicate r is in block r mod B
        altered.append(f"plan.grid.blocks: in the order {', '.join(was)} -> {', '.join(blocks)}")
    return altered


def changes(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield one line per key in which two documents of mappings and plain values differ.

    Example:
        >>> list(changes({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": 4}))
        ['a.b: 1 -> 3', 'd: nothing -> 4']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            path = f"{key}.{name}" if key else name
            yield from changes(old.get(name, "nothing"), new.get(name, "nothing"), path)
    elif old != new:
        yield f"{key}: {old} -> {new}"


def lock_choice(directory: Path) -> Mapping[str, float]:
    """The rate chosen for each arm, locked in the plan by the first call after the tuning stage is complete.

    Raises:
        DamagedFileError: If the locked choice is not that of the results.
    """
    path = directory / layout.PLAN
    with one_at_a_time(directory):
        locked = LockedPlan.read(path)
        trials = sorted(trials_of(locked.cells.values()))
        choice = choice_of(locked.plan, [read_run(layout.result_path(directory, name)) for name in trials])
        if locked.choice is None:
            write_atomically(path, encode_plan({**locked.document, CHOICE: asdict(choice)}))
        elif locked.choice != choice:
            problem = "its choice of rates is not that of the results of the tuning stage"
            raise DamagedFileError(f"{path}: {problem}")
    return choice.rates


def _locked(path: Path, *, begun: bool) -> LockedPlan | None:
    """The locked plan; None if there is none, or if it is damaged and no cell has started."""
    try:
        before = LockedPlan.read(path)
        if not before.recomputed:
            raise DamagedFileError(
                f"{path}: does not match its hash; change the plan file, never the locked plan"
            )
    except FileNotFoundError:
        return None
    except DamagedFileError:
        if begun:
            raise
        return None
    return before
