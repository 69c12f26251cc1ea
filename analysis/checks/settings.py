"""Checks of the settings that runs recorded, and of the rows that they read, against their plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.checks.traces import by_arm, grouped, listed
from analysis.results.keys import BETA, flat, plain_key
from analysis.results.locked import LockedPlan
from analysis.results.plan import Plan
from analysis.results.records import Run
from analysis.results.sweep import Problem
from lit_klrb import schema

# Sections of the settings that are recorded completely, apart from nulls, lists and local paths, and keys of
# the trainer that are recorded.
SECTIONS = ("model", "data", "kl")
TRAINER = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
# Beginnings of local paths, which are not recorded.
LOCAL_PATHS = ("/", "~", ".")
# In a locked configuration this stands below the key of a file or a folder, whose path is not recorded.
_HASHED = ".sha256"
# Number of settings that are named.
_NAMED = 5
# The splits whose rows are compared, with what is done on them.
_SPLITS = {"validation": "evaluated", "train": "trained"}


def other_settings(runs: Sequence[Run], locked: LockedPlan) -> Iterator[Problem]:
    """Problems of runs of arms that were trained or evaluated otherwise than the plan says.

    The plan says it of the values of its configuration, of what its arms and blocks change, and of its rates.
    In every other setting, which is then a default, and in the rows that are read, the runs must agree.
    """
    plan = locked.plan
    recorded = [run for run in runs if run.settings]
    yield from ignored_overrides(recorded, plan, locked.rates, locked.config)
    if recorded:
        yield from _unplanned(runs, plan)
    yield from _evaluated_otherwise([run for run in recorded if run.cell.point is not None], locked)
    yield from _other_rows([run for run in runs if run.cell.point is not None and not run.diverged], plan)


def ignored_overrides(
    runs: Sequence[Run], plan: Plan, rates: Mapping[str, float], config: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """A problem for each run whose recorded settings are not those of the plan.

    Args:
        runs: Runs of the grid and of the tuning stage, with recorded settings.
        plan: Their plan.
        rates: Arm -> the rate that was chosen for its runs in the grid.
        config: The locked configuration of the last stage.
    """
    last = plan.stages[list(plan.stages)[-1]]
    shared = _leaves({**(config or {}), **last.overrides})
    for run in runs:
        where = run.cell.where
        beta = {} if where is None else {BETA: where.beta}
        inputs = {} if where is None else plan.inputs(where.replicate)
        rate = {plan.tuning.key: rates.get(run.point.arm)} if plan.tuning and run.cell.point else {}
        for key, value in _leaves({**beta, **run.cell.overrides, **rate}, shared).items():
            recorded = run.settings.get(key, run.settings.get(f"{key}.class_path"))
            if _recorded(key, value) and key not in inputs and not _same(value, recorded):
                text = f"its settings have {key} = {recorded or 'none'}, expected {value}"
                yield Problem(f"{run.file}: {text}", serious=True, kind=f"ignored {key}")


def _unplanned(runs: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """A problem that names the settings in which runs differ although the plan does not change them."""
    arms, differing = by_arm(runs), []
    settings = {run: _settings(run) for run in runs}
    for key in sorted({key for of_arm in settings.values() for key in of_arm}):
        values = {label: sorted({settings[run].get(key, "none") for run in of_arm}) for label, of_arm in arms}
        if not _changes(plan, key) and len({value for of_arm in values.values() for value in of_arm}) > 1:
            differing.append(f"{key} ({listed(values)})")
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        names = ", ".join(differing[:_NAMED]) + more
        text = f"the runs differ in settings that the plan does not change: {names}"
        yield Problem(f"{text}; run them again as planned, or plan arms that differ so", serious=True)


def _settings(run: Run) -> dict[str, str]:
    """The recorded settings of a run, with the number of its processes as `trainer.devices`."""
    return {**run.settings, **({"trainer.devices": f"{run.processes}"} if run.processes else {})}


def _evaluated_otherwise(grid: Sequence[Run], locked: LockedPlan) -> Iterator[Problem]:
    """Settings of the evaluation in which the runs of a pair differ, even if they are planned to."""
    plan, planned = locked.plan, {plain_key(key) for arm in locked.arms.values() for key in arm.evaluation}
    changed = {key for overrides in plan.grid.arms.values() for key in overrides}
    pairs = grouped(grid, lambda run: (run.point.beta_index, run.point.replicate))
    for key in schema.EVALUATED_WITH:
        for runs in pairs.values() if key not in planned and _changes(plan, key) else ():
            values = {run.point.arm: run.settings.get(key) for run in runs}
            # A module may lack a setting; of a setting that an arm changes, none is the default
            known = {value for value in values.values() if value is not None or key in changed}
            if len(known) > 1:
                each = ", ".join(f"{label} with {value or 'none'}" for label, value in values.items())
                text = f"the arms were evaluated with other values of {key}: {each}"
                yield Problem(text, serious=True, kind=f"evaluated with {key}")


def _other_rows(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Runs with the same settings of the data that read other rows."""

    def settings(run: Run) -> object:
        data = {key: value for key, value in run.settings.items() if key.startswith("data.")}
        return plan.grid.block_of(run.point.replicate), tuple(sorted(data.items()))

    for split, what in _SPLITS.items():
        for runs in grouped(grid, settings).values():
            runs_by_rows: dict[str, list[Run]] = {}
            for run in runs:
                runs_by_rows.setdefault(run.rows.get(split, ""), []).append(run)
            if len(runs_by_rows) > 1:
                listing = "; ".join(
                    f"{', '.join(sorted({run.point.arm for run in of_rows}))} {digest[:12] or 'unknown ones'}"
                    for digest, of_rows in sorted(runs_by_rows.items())
                )
                text = f"runs with the same settings of the data were {what} on other rows: {listing}"
                yield Problem(f"{text} (SHA-256); run them again on the same data", serious=True)


def _changes(plan: Plan, key: str) -> bool:
    """Whether a plan changes a setting, or what it is part of, within its grid or its tuning stage."""
    grid = plan.grid
    blocks = [key for block in grid.blocks.values() for key in (*block.overrides, *block.inputs)]
    arms = [key for overrides in grid.arms.values() for key in overrides]
    changed = [BETA, *arms, *blocks, *([plan.tuning.key] if plan.tuning else [])]
    places = {each.removesuffix(".class_path") for each in changed}
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in places)


def _leaves(overrides: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plain values of overrides by plain key; a value replaces what earlier ones set below its key."""
    leaves = dict(before or {})
    for key, value in overrides.items():
        for whole, leaf in sorted(flat({key: value}), key=lambda pair: not pair[0].endswith("class_path")):
            plain = plain_key(whole).removesuffix(".class_path")
            leaves = {old: kept for old, kept in leaves.items() if not old.startswith(f"{plain}.")}
            leaves[plain] = leaf
    return leaves


def _recorded(key: str, value: Any) -> bool:
    """Whether a run records this value of this key."""
    section, _, rest = key.partition(".")
    known = (section in SECTIONS and not key.endswith(_HASHED)) or (section == "trainer" and rest in TRAINER)
    plain = value is not None and not isinstance(value, list)
    return known and plain and not str(value).startswith(LOCAL_PATHS)


def _same(expected: Any, recorded: str | None) -> bool:
    """Whether a recorded value is the planned one, whatever the notation of numbers and classes."""
    if recorded is None:
        return False
    try:
        return float(expected) == float(recorded)
    except ValueError:
        one, other = str(expected).casefold(), recorded.casefold()
        if f"{one}.{other}".replace(".", "").isidentifier():  # a class may be given with its package
            one, other = one.rpartition(".")[2], other.rpartition(".")[2]
        return one == other
