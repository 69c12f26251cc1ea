"""Checks of the runs of a grid against each other and their plan: copies, impossible values, differences."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from analysis.results.logs import flat
from analysis.results.plan import BETA, Plan, by_beta, plain_key
from analysis.results.records import Failure, Run
from lit_klrb import schema

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


def inconsistencies(
    runs: Sequence[Run], plan: Plan, *, imported: bool, units_unknown: bool = False
) -> list[Problem]:
    """Problems of the runs of the grid that did not diverge.

    Args:
        runs: All runs of a sweep.
        plan: Its plan.
        imported: Whether the runs were logged by other software, whose estimates of the KL can be negative.
        units_unknown: Whether some KLs may be per token and others per completion.
    """
    grid = [run for run in runs if run.cell.point is not None and not run.diverged]
    trained = [run for run in runs if run.cell.arm is not None and not run.diverged]
    blocks = [
        [run for run in grid if plan.grid.block_of(run.point.replicate) == block]
        for block in plan.grid.blocks or [""]
    ]
    return [
        *_copies(trained),
        *_same_weights(trained),
        *_negative(grid, imported),
        *(_units(grid, plan) if units_unknown else ()),
        *(problem for block in blocks for problem in _arms(block, plan)),
        *ignored_overrides(trained, plan),
        *_settings(grid, plan),
        *(
            problem
            for block in blocks
            for problem in _unlike(block, "end at different steps", _last_step, _rollouts)
        ),
        *_unlike(grid, "were made with different versions", _versions),
    ]


def lost_runs(failures: Sequence[Failure], plan: Plan) -> list[Problem]:
    """A problem if runs of the grid ended without a result."""
    counts = Counter(failure.cell.point.arm for failure in failures if failure.cell.point is not None)
    if not counts:
        return []
    told = ", ".join(f"{label} {counts[label]}" for label in plan.grid.arms)
    return [
        Problem(
            f"runs without a result: {told}; their pairs are left out, which is sound only if the reason has "
            "nothing to do with how well they trained"
        )
    ]


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
            text = (
                f"{len(group)} runs of {seeds} seeds have the same weights, {schema.WEIGHTS} {weights[:12]}"
            )
            yield Problem(text, serious=True, kind="the same weights")


def _negative(grid: Sequence[Run], imported: bool) -> Iterator[Problem]:
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
            yield Problem(
                f"at beta {beta:g} the KL of {most} is {arms[most] / arms[least]:.0f} times that of {least}: "
                "per completion beside per token? `kl_unit: sequence` in the mapping states that all are per "
                "completion",
                serious=True,
            )


def _mean_kls(grid: Sequence[Run]) -> dict[tuple[str, int], float]:
    """(arm, beta index) -> mean KL over replicates."""
    groups = _grouped(grid, lambda run: (run.point.arm, run.point.beta_index))
    return {place: fmean(run.outcome(schema.KL) for run in runs) for place, runs in groups.items()}


def _arms(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Arms whose runs do not change the same values, apart from those that the plan gives for each beta."""
    for label, runs in _by_arm(grid).items():
        varied = {key for key, value in plan.grid.arms.get(label, {}).items() if by_beta(value) is not None}
        groups: dict[int, set[str]] = defaultdict(set)
        for run in runs:
            changes = run.cell.overrides
            groups[-1].add(repr(sorted((key, changes[key]) for key in changes if key not in varied)))
            groups[run.point.beta_index].add(repr(sorted(changes.items())))
        for found in groups.values():
            if len(found) > 1:
                text = f"the runs of {label} change different values: {'; '.join(sorted(found))}"
                yield Problem(text, serious=True)
                break


def _settings(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Hyperparameters in which matched runs differ though no arm changes them."""
    planned = tuple(plain_key(key) for overrides in plan.grid.arms.values() for key in overrides)
    planned += (plain_key(plan.tuning.key),) if plan.tuning else ()
    found: dict[str, set[str]] = defaultdict(set)
    for runs in _grouped(grid, lambda run: (run.point.beta_index, run.point.replicate)).values():
        settings = [run.settings for run in runs if run.settings]
        for key in {key for one in settings for key in one}:
            values = {one.get(key, "none") for one in settings}
            if len(values) > 1 and not any(f"{key}.".startswith(f"{change}.") for change in planned):
                found[key] |= values
    for key, values in sorted(found.items()):
        if key != BETA:
            yield Problem(f"matched runs differ in {key}, which no arm changes: {', '.join(sorted(values))}")


def _unlike(
    grid: Sequence[Run],
    what: str,
    of: Callable[[Run], str],
    compared: Callable[[Run], str] | None = None,
) -> Iterator[Problem]:
    """A property in which runs should agree, with its values for each arm where they do not.

    Args:
        grid: The runs.
        what: The difference, in words.
        of: The property.
        compared: A property that must agree for a verdict; by default there is none.
    """
    values = {label: sorted({of(run) for run in runs}) for label, runs in _by_arm(grid).items()}
    if len({value for own in values.values() for value in own if value}) > 1:
        told = "; ".join(f"{label} {', '.join(own)}" for label, own in values.items())
        serious = compared is not None and len({value for run in grid if (value := compared(run))}) > 1
        yield Problem(f"the runs {what}: {told}", serious=serious)


def _last_step(run: Run) -> str:
    steps = [
        curve.step[-1] for key, curve in run.curves.items() if key.startswith("train/") and len(curve.step)
    ]
    return f"{max(steps):g}" if steps else ""


def _rollouts(run: Run) -> str:
    """The number of rollouts after the last step, of which an arm may make several optimizer steps."""
    last = _last_step(run)
    if not last:
        return ""
    return f"{(float(last) + 1) / math.prod(int(run.settings.get(key, 1)) for key in _PER_ROLLOUT):g}"


def _versions(run: Run) -> str:
    return " ".join(f"{name} {version}" for name, version in sorted(run.versions.items()))


def _by_arm(grid: Iterable[Run]) -> dict[str, list[Run]]:
    return dict(sorted(_grouped(grid, lambda run: run.point.arm).items()))


def _grouped(runs: Iterable[Run], key: Callable[[Run], Key]) -> dict[Key, list[Run]]:
    """The runs by what they have in common."""
    groups: dict[Key, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return groups


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
                yield Problem(f"{run.file}: {text}", serious=True, kind=f"ignored {key}")


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
