"""Compares the recorded settings of runs with their plan: an override that a run ignored is an accident."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.results.grid import BETA, plain_key
from analysis.results.logs import flat
from analysis.results.plan import Plan
from analysis.results.records import Run
from analysis.results.sweep import Problem

# Sections of the settings that are recorded completely, apart from nulls, lists and local paths, and keys of
# the trainer that are recorded.
SECTIONS = ("model", "data", "kl")
TRAINER = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
# Beginnings of local paths, which are not recorded.
LOCAL_PATHS = ("/", "~", ".")


def ignored_overrides(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """A problem for each run whose recorded settings are not those of the plan.

    Args:
        grid: Runs of the grid and of the tuning stage. Those without recorded settings are skipped.
        plan: Their plan.
    """
    last = plan.stages[list(plan.stages)[-1]]
    shared = {key: value for key, value in last.overrides.items() if key not in last.inputs}
    for run in grid:
        if not run.settings:
            continue
        where = run.cell.point or run.cell.trial
        expected = {**shared, **({} if where is None else {BETA: where.beta}), **run.cell.overrides}
        if plan.tuning and run.cell.trial is None:  # compared with the chosen rate instead
            expected.pop(plan.tuning.key, None)
        for key, value in _planned(expected).items():
            found = run.settings.get(key, run.settings.get(f"{key}.class_path"))
            if _recorded(key, value) and not _same(value, found):
                text = f"its settings have {key} = {_short(found)}, expected {_short(value)}"
                yield Problem(f"{run.file}: {text}", serious=True)


def _planned(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of overrides by plain key; a value replaces what earlier ones set below its key."""
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        for whole, leaf in flat({key: value}):
            place = plain_key(whole).removesuffix(".class_path")
            found = {old: kept for old, kept in found.items() if not old.startswith(f"{place}.")}
            found[place] = leaf
    return found


def _recorded(key: str, value: Any) -> bool:
    """Whether a run records this value of this key."""
    section, _, rest = key.partition(".")
    known = section in SECTIONS or (section == "trainer" and rest in TRAINER)
    plain = value is not None and not isinstance(value, list)
    return known and plain and not str(value).startswith(LOCAL_PATHS)


def _same(expected: Any, found: str | None) -> bool:
    """Whether a recorded value is the planned one, whatever the notation of numbers and classes."""
    if found is None:
        return False
    try:
        return float(expected) == float(found)
    except ValueError:
        names = str(expected).casefold(), found.casefold()
        if all(part.isidentifier() for name in names for part in name.split(".")):
            # A class may be given with its package
            names = names[0].rpartition(".")[2], names[1].rpartition(".")[2]
        return names[0] == names[1]


def _short(value: Any) -> str:
    """A value for a message: a number in its usual notation, a class without its package."""
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text.rpartition(".")[2] if text.startswith("lit_klrb.") else text
