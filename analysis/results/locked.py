"""The locked plan: the plan before the results, every later change, and the rates chosen for its arms.

`hash` covers the rest of the file, apart from the choice of rates (see `design.rates`) and the times and
commits of locking: the content (plan, configurations, code and versions), the cells it expands to, and the
history, which has the hash of each earlier version.

The hash reveals accidental or partial edits, but not edits by someone who recomputes it. To detect those,
compare it with a hash published elsewhere, such as in the commit that is recorded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass

from analysis.results.keys import ESTIMATOR
from analysis.results.layout import PLAN_SCHEMA
from analysis.results.plan import CLOSED, Count, Plan, Positive
from analysis.results.records import Arm, Cell
from analysis.results.rules import check_plan
from analysis.results.store import MALFORMED, DamagedFileError, digest, read_json, reason
from lit_klrb.errors import ConfigurationError

# Keys of the content: configurations of the stages, properties of the arms, and the source of imported runs.
CONFIGS, ARMS, IMPORTED = "configs", "arms", "imported"
# Keys of the document outside of its hash: the choice of rates, and when its versions were locked.
CHOICE, LOCKED = "choice", "locked"


@dataclass(frozen=True, config=CLOSED, kw_only=True)
class Stated:
    """What a mapping says about imported logs."""

    # Names of the columns for arm, beta, replicate, seed, reward, kl, step and run. Without a column of
    # seeds, the name of a replicate is its seed. With a column of steps, a run has several rows, the last of
    # which is its result. {arm}, {beta}, {replicate} and {run} in the name of a metric's column mean that
    # each run has a separate column.
    columns: dict[str, str]
    # Arm, beta and replicate of each run, by name, for logs that have only `run`
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    # "sequence" states that all logged KLs are KL(policy || reference), summed over a completion. Without it
    # there is no verdict where those of two arms differ so much that one may be per token.
    kl_unit: Literal["sequence"] | None = None
    # "task" states that all logged rewards are those of the task: of one function, scale and sign, without a
    # penalty. Without it there is no verdict where those of two arms differ as if not.
    reward_unit: Literal["task"] | None = None
    # What is done where a run is missing: "withhold" gives no verdict, "leave_out_replicate" leaves out the
    # runs of its replicate at its beta, in all arms
    incomplete: Literal["withhold", "leave_out_replicate"] = "withhold"


@dataclass(frozen=True, config=CLOSED, kw_only=True)
class Origin(Stated):
    """Where imported runs come from, and what was stated about them."""

    source: str  # the name of the log or the folder
    files: dict[str, str]  # name of each log -> SHA-256 of its bytes
    repeated_rows: Count = 0  # number of rows that stood in the logs before


@dataclass(frozen=True, config=CLOSED)
class Choice:
    """The rate chosen for each arm, and the checksums of the runs of the tuning stage it rests on, by id."""

    rates: dict[str, Positive]
    results: dict[str, str]


@dataclass(frozen=True, config=CLOSED)
class Moment:
    """When a version of a plan was locked, and at which commit, with which it can be compared."""

    time: str  # in UTC, ISO 8601
    # Of the folder in which the command ran, and "-dirty" if files of it had changed; None outside of git
    commit: str | None = None

    def __str__(self) -> str:
        return f"{self.time.replace('T', ' ')} at {f'commit {self.commit}' if self.commit else 'no commit'}"


@dataclass(frozen=True, config=CLOSED)
class Version:
    """One version of a plan, its changes, and how many results could be seen when it was locked."""

    published: Count
    changes: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, config=CLOSED)
class LockedPlan:
    """The plan in the directory of its sweep."""

    hash: str
    recomputed: StrictBool  # whether the file, `document`, has the hash that it is locked with
    cells: dict[str, Cell]  # id -> cell
    arms: dict[str, Arm]  # label -> properties of the arm
    # Its versions, oldest first; the last is the plan
    history: Annotated[tuple[Version, ...], Field(min_length=1)]
    document: Mapping[str, Any]
    origin: Origin | None = None  # where the runs were imported from; None for runs of this package
    choice: Choice | None = None  # the choice of rates; None without tuning, or before it is complete
    moments: tuple[Moment | None, ...] = ()  # those of the versions in `history`; None where unknown
    # The configuration of the last stage, with hashes in place of paths; empty for an import
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan as it is now."""
        return self.history[-1].plan

    @property
    def changed_after_results(self) -> bool:
        """Whether any version was locked when results could have been seen."""
        return any(version.published > 0 for version in self.history)

    @property
    def rates(self) -> dict[str, float]:
        """Arm -> its chosen rate; empty without a choice."""
        return {} if self.choice is None else self.choice.rates

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a locked plan, even if its hash does not match, see `recomputed`.

        Raises:
            DamagedFileError: If the file is not a locked plan.
        """
        document = read_json(path)
        try:
            return cls._of(document, str(path.parent))
        except (*MALFORMED, ConfigurationError) as error:
            raise DamagedFileError(f"{path}: not a locked plan ({reason(error)})") from None

    @classmethod
    def _of(cls, document: dict[str, Any], directory: str) -> Self:
        if document["schema"] != PLAN_SCHEMA:
            raise ValueError(f"schema {document['schema']!r}; this version reads {PLAN_SCHEMA}")
        content, history = document["content"], document["history"]
        records = [*(each["plan"] for each in history[:-1]), content["plan"]]
        plans = [Plan.of_record(record, directory) for record in records]
        check_plan(plans[-1])
        known, arms = content.get(ARMS, {}), plans[-1].grid.arms.items()
        hashes = [*(each["previous"] for each in history[1:]), document["hash"]]
        versions = zip(history, plans, strict=True)
        return cls(
            hash=document["hash"],
            recomputed=history[-1]["plan"] == content["plan"] and hash_of(document) == document["hash"],
            cells={cell["id"]: Cell.of_record(cell["id"], cell) for cell in document["cells"]},
            arms={
                label: known.get(label, {"estimator": overrides.get(ESTIMATOR)}) for label, overrides in arms
            },
            history=tuple(Version(one["published"], one["changes"], plan) for one, plan in versions),
            document=document,
            origin=content.get(IMPORTED),
            choice=document.get(CHOICE),
            moments=tuple(document.get(LOCKED, {}).get(one) for one in hashes),
            config=content.get(CONFIGS, {}).get([*plans[-1].stages][-1], {}),
        )


def hash_of(document: Mapping[str, Any]) -> str:
    """The hash of a locked plan: of all in the file but the hash, the choice of rates and the times."""
    return digest({key: value for key, value in document.items() if key not in ("hash", CHOICE, LOCKED)})


def lock_document(
    plan: Plan,
    content: Mapping[str, Any],
    cells: Sequence[Cell],
    *,
    before: LockedPlan | None = None,
    published: int = 0,
    changes: Sequence[str] = (),
    moment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a locked plan.

    Args:
        plan: The plan.
        content: The plan's record and everything else that is hashed into the ids of its cells.
        cells: The cells it expands to.
        before: The version it replaces; None if no cell had started under it.
        published: Number of published results.
        changes: Differences from the version before, one line per key.
        moment: The fields of its `Moment`; None for an import, whose plan is made after its runs.
    """
    version: dict[str, Any] = {"previous": before and before.hash, "published": published}
    version |= {"changes": list(changes), "plan": plan.record()}
    document: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "content": dict(content),
        "cells": [{"id": cell.id, **cell.record()} for cell in cells],
        "history": [*(before.document["history"] if before else ()), version],
    }
    document = json.loads(json.dumps(document))
    document = {"hash": hash_of(document), **document}
    if before and before.choice is not None and trials_of(before.cells.values()) == trials_of(cells):
        document[CHOICE] = before.document[CHOICE]
    if moment is not None:
        document[LOCKED] = {**(before.document.get(LOCKED, {}) if before else {}), document["hash"]: moment}
    return document


def encode_plan(document: Mapping[str, Any]) -> bytes:
    """The content of the file of a locked plan."""
    return json.dumps(document, indent=1).encode() + b"\n"


def trials_of(cells: Iterable[Cell]) -> set[str]:
    """The ids of the cells of the tuning stage."""
    return {cell.id for cell in cells if cell.trial is not None}
