"""Checks of a locked plan, and of its runs: other cells, copies, impossible values, ignored settings."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from analysis.results import layout
from analysis.results.locked import LockedPlan
from analysis.results.plan import BETA, Plan, flat, plain_key
from analysis.results.records import Cell, Failure, Run
from lit_klrb import schema

Item = TypeVar("Item")
Key = TypeVar("Key")
# The common evaluator's KL is an average of exact KLs of tokens: what is below 0 is rounding.
_ROUNDING = 1e-3
# Larger ratios of two arms' KLs are those of different units, unless an import states their unit.
_UNIT_RATIO = 8.0
# Settings whose product is the number of optimizer steps of a rollout.
_PER_ROLLOUT = ("model.inner_epochs", "model.mini_batches")
# The metrics whose curves identify a run.
_TRACES = ("train/", "val/")
# Sections of the settings that are recorded completely, apart from nulls, lists and local paths, and keys of
# the trainer that are recorded.
SECTIONS = ("model", "data", "kl")
TRAINER = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
# Beginnings of local paths, which are not recorded.
LOCAL_PATHS = ("/", "~", ".")


@dataclass(frozen=True)
class Problem:
    """A problem with the files of a sweep.

    Attributes:
        text: One line that names the problem and the file.
        serious: Whether it rules out a verdict, because the design that the tests assume cannot be trusted.
        unread: Whether it is a file that could not be read, whose content is not known.
        kind: What it has in common with others that are counted with it; "" if it stands alone.
        count: Number of such problems, of which the text is about the first.
    """

    text: str
    serious: bool = False
    unread: bool = False
    kind: str = ""
    count: int = 1


def counted(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, of each kind the first with their number."""
    groups: dict[object, list[Problem]] = defaultdict(list)
    for number, problem in enumerate(problems):
        groups[(problem.kind, problem.serious, problem.unread) if problem.kind else number].append(problem)
    return [
        first
        if not others
        else replace(first, text=f"{first.text}; and {len(others)} more", count=1 + len(others))
        for first, *others in groups.values()
    ]


def plan_problems(locked: LockedPlan) -> Iterator[Problem]:
    """Problems of a locked plan: its hash, cells that do not match it, imports, evaluations."""
    if not locked.recomputed:
        text = f"does not have the hash {locked.hash[:12]} that it is locked with; it was edited after it was"
        yield Problem(f"{layout.PLAN}: {text} locked", serious=True)
    for text in _alien_cells(locked):
        yield Problem(text, serious=True)
    if (origin := locked.origin) is not None:
        text = f"the runs were imported from {origin.source}: they were not scored by the common evaluator"
        yield Problem(f"{text}; reward and KL are what the software that trained them logged")
        if origin.repeated_rows:
            yield Problem(f"{origin.repeated_rows} rows stood twice in what was imported and count once")
    control = locked.plan.primary.control
    for label, arm in locked.arms.items():
        for key, (own, other) in arm.evaluation.items():
            text = f"{label} was evaluated with {key} = {own}, {control} with {other}"
            yield Problem(text, serious=True)


def _alien_cells(locked: LockedPlan) -> Iterator[str]:
    """One line on cells that the plan does not give, and on each pair with several seeds."""
    plan, cells = locked.plan, locked.cells.values()
    grid = [cell.place for cell in cells if cell.place is not None]
    trials = [cell.trial for cell in cells if cell.trial is not None]
    if sorted(grid) != sorted(plan.places) or sorted(trials) != sorted(plan.trials):
        yield f"{layout.PLAN}: its cells are not those of its grid"
        return
    ids = {cell.stage: cell.id for cell in cells if cell.arm is None}
    alien = ((cell, what) for cell in cells for what in _differences(cell, plan, ids))
    yield from (f"{layout.PLAN}: {cell}: {what}" for cell, what in [*alien][:1])
    seeds = _grouped(((cell.place[1:], cell.seed) for cell in cells if cell.place), lambda pair: pair[0])
    for (index, replicate), pairs in seeds.items():
        if len(own := sorted({seed for _, seed in pairs})) > 1:
            yield f"the runs of beta index {index}, replicate {replicate} have different seeds: {own}"


def _differences(cell: Cell, plan: Plan, ids: Mapping[str, str]) -> Iterator[str]:
    """What a cell of the grid or of the tuning stage does not have as the plan gives it."""
    place = cell.point or cell.trial
    if place is None:
        return
    if place.beta != (beta := plan.grid.beta[place.beta_index]):
        yield f"its beta is {place.beta:g}, expected {beta:g}"
    rate = {plan.tuning.key: cell.trial.rate} if plan.tuning and cell.trial else {}
    if cell.overrides != (overrides := {**plan.overrides(place), **rate}):
        yield f"its overrides are {cell.overrides}, expected {overrides}"
    stages = plan.inputs(place.replicate).values()
    if {*cell.needs} != {ids.get(stage) for stage in stages}:
        yield f"it does not start from {' and '.join(stages)}"


def inconsistencies(runs: Sequence[Run], locked: LockedPlan) -> Iterator[Problem]:
    """Problems of the runs of a sweep that did not diverge."""
    plan, origin = locked.plan, locked.origin
    trained = [run for run in runs if run.cell.arm is not None and not run.diverged]
    grid = [run for run in trained if run.cell.point is not None]
    yield from _copies(trained)
    yield from _same_weights(trained)
    yield from _negative(grid, imported=origin is not None)
    if origin is not None and origin.kl_unit is None:
        yield from _units(grid, plan)
    yield from ignored_overrides(trained, plan, locked.rates)
    for block in _grouped(grid, lambda run: plan.grid.block_of(run.point.replicate)).values():
        yield from _unlike(block, "end at different steps", _last_step, _rollouts)
    yield from _unlike(grid, "were made with different versions", _versions)


def lost_runs(failures: Sequence[Failure], plan: Plan) -> Iterator[Problem]:
    """A problem if runs of the grid ended without a result."""
    counts = Counter(failure.cell.point.arm for failure in failures if failure.cell.point is not None)
    if counts:
        told = ", ".join(f"{label} {counts[label]}" for label in plan.grid.arms)
        why = "sound only if the reason has nothing to do with how well they trained"
        yield Problem(f"runs without a result: {told}; their pairs are left out, which is {why}")


def _copies(grid: Sequence[Run]) -> Iterator[Problem]:
    """Runs whose curves agree in every digit. With the same seed, both arms may do the same."""

    def traces(run: Run) -> tuple[tuple[str, bytes], ...]:
        curves = [(key, run.curves[key].value) for key in sorted(run.curves) if key.startswith(_TRACES)]
        long = any(len(value) > 1 for _, value in curves)
        return tuple((key, value.tobytes()) for key, value in curves) if long else ()

    for same, group in _grouped(grid, traces).items():
        if same and len(group) > 1:
            names = ", ".join(run.file for run in group)
            seeds = len({run.cell.seed for run in group})
            told = "different seeds" if seeds > 1 else "one seed: a copy, or arms that do the same"
            text = f"{names}: the same curves in every digit at {told}"
            yield Problem(text, serious=seeds > 1, kind="the same curves")


def _same_weights(grid: Sequence[Run]) -> Iterator[Problem]:
    """Runs of different seeds that ended with the same weights: copies, or runs that did not train."""
    for weights, group in _grouped(grid, lambda run: run.weights).items():
        seeds = len({run.cell.seed for run in group})
        if weights and seeds > 1:
            text = f"{len(group)} runs of {seeds} seeds have the same weights"
            yield Problem(f"{text}, {schema.WEIGHTS} {weights[:12]}", serious=True, kind="the same weights")


def _negative(grid: Sequence[Run], *, imported: bool) -> Iterator[Problem]:
    """Negative KLs of runs, and of arms: an estimate can be negative for a run, but not on average."""
    for run in grid:
        kl = run.outcome(schema.KL)
        if kl < -_ROUNDING:
            text = f"{run.file}: its KL is {kl:g}; a KL is not negative"
            yield Problem(text, serious=not imported, kind="a negative KL")
    for (label, index), mean in _mean_kls(grid).items() if imported else ():
        if mean < -_ROUNDING:
            yield Problem(f"the mean KL of {label} at beta index {index} is {mean:g}", serious=True)


def _units(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Arms whose logged KLs differ as those of a token and of a whole completion do."""
    means = _mean_kls(grid)
    for index, beta in plan.grid.beta.items():
        arms = {label: mean for (label, place), mean in means.items() if place == index and mean > 0}
        least, most = (choose(arms, key=lambda label: arms[label], default="") for choose in (min, max))
        if arms and arms[most] > _UNIT_RATIO * arms[least]:
            text = (
                f"at beta {beta:g} the KL of {most} is {arms[most] / arms[least]:.0f} times that of {least}"
            )
            why = "`kl_unit: sequence` in the mapping states that all are per completion"
            yield Problem(f"{text}: per completion beside per token? {why}", serious=True)


def _mean_kls(grid: Sequence[Run]) -> dict[tuple[str, int], float]:
    """(arm, beta index) -> mean KL over replicates."""
    groups = _grouped(grid, lambda run: (run.point.arm, run.point.beta_index))
    return {place: fmean(run.outcome(schema.KL) for run in runs) for place, runs in groups.items()}


def _unlike(
    grid: Sequence[Run], what: str, of: Callable[[Run], str], compared: Callable[[Run], str] | None = None
) -> Iterator[Problem]:
    """A property in which runs should agree, with its values for each arm where they do not.

    Args:
        grid: The runs.
        what: The difference, in words.
        of: The property.
        compared: A property that must agree for a verdict; by default there is none.
    """
    arms = sorted(_grouped(grid, lambda run: run.point.arm).items())
    values = {label: sorted({of(run) for run in runs}) for label, runs in arms}
    if len({value for own in values.values() for value in own if value}) > 1:
        told = "; ".join(f"{label} {', '.join(own)}" for label, own in values.items())
        serious = compared is not None and len({value for run in grid if (value := compared(run))}) > 1
        yield Problem(f"the runs {what}: {told}", serious=serious)


def _last_step(run: Run) -> str:
    curves = [curve for key, curve in run.curves.items() if key.startswith("train/")]
    steps = [curve.step[-1] for curve in curves if len(curve.step)]
    return f"{max(steps):g}" if steps else ""


def _rollouts(run: Run) -> str:
    """The number of rollouts after the last step, of which an arm may make several optimizer steps."""
    last, steps = _last_step(run), math.prod(int(run.settings.get(key, 1)) for key in _PER_ROLLOUT)
    return f"{(float(last) + 1) / steps:g}" if last else ""


def _versions(run: Run) -> str:
    return " ".join(f"{name} {version}" for name, version in sorted(run.versions.items()))


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Runs or cells by what they have in common."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def ignored_overrides(grid: Sequence[Run], plan: Plan, rates: Mapping[str, float]) -> Iterator[Problem]:
    """A problem for each run whose recorded settings are not those of the plan.

    Args:
        grid: Runs of the grid and of the tuning stage. Those without recorded settings are skipped.
        plan: Their plan.
        rates: Arm -> the rate that was chosen for its runs in the grid.
    """
    last = plan.stages[list(plan.stages)[-1]]
    shared = {key: value for key, value in last.overrides.items() if key not in last.inputs}
    for run in filter(lambda run: run.settings, grid):
        where = run.cell.point or run.cell.trial
        beta = {} if where is None else {BETA: where.beta}
        rate = {plan.tuning.key: rates.get(run.point.arm)} if plan.tuning and run.cell.point else {}
        for key, value in _leaves({**shared, **beta, **run.cell.overrides, **rate}).items():
            found = run.settings.get(key, run.settings.get(f"{key}.class_path"))
            if _recorded(key, value) and not _same(value, found):
                text = f"its settings have {key} = {found or 'none'}, expected {value}"
                yield Problem(f"{run.file}: {text}", serious=True, kind=f"ignored {key}")


def _leaves(overrides: Mapping[str, Any]) -> dict[str, Any]:
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
        one, other = str(expected).casefold(), found.casefold()
        if f"{one}.{other}".replace(".", "").isidentifier():  # a class may be given with its package
            one, other = one.rpartition(".")[2], other.rpartition(".")[2]
        return one == other
