"""The locked plan: the plan before the results, and every later change.

`hash` covers the rest of the file, apart from the choice of rates, which the results of the tuning stage give
(see `tuning`): the content (plan, configurations, code and versions), the cells it
expands to, and the history, which has the hash of each earlier version. In files of schema 1, written by
earlier versions, it covers only the content.

The hash reveals accidental or partial edits, but not edits by someone who recomputes it. To detect those,
compare it with a hash published elsewhere, such as in a commit.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from analysis.results.arm import Arm
from analysis.results.cell import ESTIMATOR, Cell
from analysis.results.checksum import digest
from analysis.results.files import MALFORMED, DamagedFileError, read_json
from analysis.results.layout import PLAN_SCHEMA
from analysis.results.plan import Plan

# The key of the content with the properties of the arms.
ARMS = "arms"
# The key of the content with the source of imported runs.
IMPORTED = "imported"
# Its key with the unit of their KLs, where that was stated.
KL_UNIT = "kl_unit"
# The key of the document with the choice of rates.
CHOICE = "choice"
# The keys of margins in plans of schema 1.
_RENAMED = {"T4": "objective", "T5": "matched_kl"}


@dataclass(frozen=True)
class Version:
    """One version of a plan.

    Attributes:
        published: Number of results when it was locked, which could have been seen.
        changes: Its changes, one line per key.
        plan: The plan; None for an earlier version in a file of schema 1, which does not contain it.
    """

    published: int
    changes: tuple[str, ...]
    plan: Plan | None


@dataclass(frozen=True)
class LockedPlan:
    """The plan in the directory of its sweep.

    Attributes:
        schema: Number of the file's format.
        hash: The hash it is locked with.
        recomputed: Whether the file has that hash.
        plan: The plan.
        cells: Id -> cell.
        arms: Label -> properties of the arm.
        history: Its versions, oldest first; the last is the plan.
        document: The whole file.
    """

    schema: int
    hash: str
    recomputed: bool
    plan: Plan
    cells: Mapping[str, Cell]
    arms: Mapping[str, Arm]
    history: tuple[Version, ...]
    document: Mapping[str, Any]

    @property
    def changed_after_results(self) -> bool:
        """Whether any version was locked when results could have been seen."""
        return any(version.published > 0 for version in self.history)

    @property
    def imported_from(self) -> str | None:
        """The log from which the runs were imported; None for runs of this package."""
        origin = self.document["content"].get(IMPORTED)
        return None if origin is None else str(origin["source"])

    @property
    def choice(self) -> Mapping[str, Any] | None:
        """The record of the choice of rates; None without tuning, or before it is complete."""
        found: Mapping[str, Any] | None = self.document.get(CHOICE)
        return found

    @property
    def rates(self) -> dict[str, float]:
        """Arm -> its chosen rate; empty without a choice."""
        return {} if self.choice is None else dict(self.choice["rates"])

    @property
    def units_unknown(self) -> bool:
        """Whether the runs were imported without a statement on the unit of their KLs."""
        return KL_UNIT not in self.document["content"].get(IMPORTED, {KL_UNIT: None})

    @property
    def versions(self) -> list[Plan]:
        """All versions of the plan in the file, oldest first."""
        return [version.plan for version in self.history if version.plan is not None]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a locked plan, even if its hash does not match, see `recomputed`.

        Raises:
            DamagedFileError: If the file is not a locked plan.
        """
        document = read_json(path)
        try:
            return cls._of(document, path)
        except MALFORMED as error:
            raise DamagedFileError(f"{path}: not a locked plan ({type(error).__name__}: {error})") from None

    @classmethod
    def _of(cls, document: dict[str, Any], path: Path) -> Self:
        schema, directory = document["schema"], str(path.parent)
        if schema not in (1, PLAN_SCHEMA):
            raise ValueError(f"schema {schema!r}; this version reads 1 and {PLAN_SCHEMA}")
        cells = [Cell.of_record(cell["id"], cell) for cell in document["cells"]]
        record = document["content"]["plan"]
        plan = Plan.of_record(record if schema > 1 else _updated(record, cells), directory)
        choice = document.get(CHOICE)
        if choice is not None and not all(float(rate) > 0 for rate in choice["rates"].values()):
            raise ValueError(f"{CHOICE} is {choice!r}")
        *earlier, _ = document["history"]
        plans = [Plan.of_record(each["plan"], directory) if schema > 1 else None for each in earlier]
        history = [
            Version(int(each["published"]), tuple(map(str, each["changes"])), own)
            for each, own in zip(document["history"], [*plans, plan], strict=True)
        ]
        return cls(
            schema,
            str(document["hash"]),
            _recomputes(document),
            plan,
            {cell.id: cell for cell in cells},
            _arms(plan, document["content"].get(ARMS, {})),
            tuple(history),
            document,
        )


def _arms(plan: Plan, found: Mapping[str, Any]) -> dict[str, Arm]:
    """The properties of each arm; only the estimator for plans of earlier versions."""
    return {
        label: Arm.of_record(found[label]) if label in found else Arm(estimator=str(overrides.get(ESTIMATOR)))
        for label, overrides in plan.grid.arms.items()
    }


def _updated(record: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """Convert the record of a plan of schema 1, whose stages were sorted by name, to the current schema."""
    primary = record["primary"]
    margins = {_RENAMED.get(key, key): margin for key, margin in primary["margins"].items()}
    stages = {name: record["stages"][name] for name in dict.fromkeys(cell.stage for cell in cells)}
    return {**record, "stages": stages, "primary": {**primary, "margins": margins}}


def _recomputes(document: Mapping[str, Any]) -> bool:
    try:
        if document["schema"] == 1:
            return bool(digest(document["content"]) == document["hash"] == document["history"][-1]["hash"])
        same_plan = document["history"][-1]["plan"] == document["content"]["plan"]
        return bool(same_plan and hash_of(document) == document["hash"])
    except ValueError:
        return False


def hash_of(document: Mapping[str, Any]) -> str:
    """The hash of a locked plan: of everything in the file except the hash itself and the choice of rates."""
    return digest({key: value for key, value in document.items() if key not in ("hash", CHOICE)})


def lock_document(
    plan: Plan,
    content: Mapping[str, Any],
    cells: Sequence[Cell],
    *,
    before: LockedPlan | None = None,
    published: int = 0,
    changes: Sequence[str] = (),
) -> bytes:
    """The content of the file of a locked plan.

    Args:
        plan: The plan.
        content: The plan's record and everything else that is hashed into the ids of its cells.
        cells: The cells it expands to.
        before: The version it replaces; None if no cell had started under it.
        published: Number of published results.
        changes: Differences from the version before, one line per key.
    """
    version = {
        "previous": before and before.hash,
        "published": published,
        "changes": list(changes),
        "plan": plan.record(),
    }
    document: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "content": dict(content),
        "cells": [{"id": cell.id, **cell.record()} for cell in cells],
        "history": [*(before.document["history"] if before else ()), version],
    }
    document = json.loads(json.dumps(document))
    document = {"hash": hash_of(document), **document}
    if before and before.choice is not None and trials_of(before.cells.values()) == trials_of(cells):
        document[CHOICE] = before.choice
    return encode_plan(document)


def encode_plan(document: Mapping[str, Any]) -> bytes:
    """The content of the file of a locked plan."""
    return json.dumps(document, indent=1).encode() + b"\n"


def trials_of(cells: Iterable[Cell]) -> set[str]:
    """The ids of the cells of the tuning stage."""
    return {cell.id for cell in cells if cell.trial is not None}
