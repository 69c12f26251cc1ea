"""Checks of the runs of a grid against each other: copies, impossible values, unplanned differences."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from analysis.results import layout
from analysis.results.cell import ESTIMATOR
from analysis.results.grid import by_beta, plain_key
from analysis.results.plan import Plan
from analysis.results.records import Failure, Run
from analysis.results.sweep import Problem
from lit_klrb import schema

# The common evaluator's KL is an average of exact KLs of tokens: what is below 0 is rounding.
_ROUNDING = 1e-3
# The key of a run's settings with its weight of the KL.
_BETA = "kl.beta"
# The metrics whose curves identify a run.
_TRACES = ("train/", "val/")


def inconsistencies(runs: Sequence[Run], plan: Plan, *, imported: bool) -> list[Problem]:
    """Problems of the runs of the grid that did not diverge.

    Args:
        runs: All runs of a sweep.
        plan: Its plan.
        imported: Whether the runs were logged by other software, whose estimates of the KL can be negative.
    """
    grid = [run for run in runs if run.cell.point is not None and not run.diverged]
    return [
        *_copies(grid),
        *_negative(grid, imported),
        *_arms(grid, plan),
        *_configured(grid),
        *_settings(grid, plan),
        *_unlike(grid, "end at different steps", _last_steps),
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
    alike: dict[Any, list[Run]] = defaultdict(list)
    for run in grid:
        curves = [(key, run.curves[key]) for key in sorted(run.curves) if key.startswith(_TRACES)]
        if any(len(curve.value) > 1 for _, curve in curves):
            alike[tuple((key, curve.value.tobytes()) for key, curve in curves)].append(run)
    for group in alike.values():
        if len(group) > 1:
            names = ", ".join(f"{layout.RESULTS}/{run.cell.id}.json" for run in group)
            seeds = len({run.cell.seed for run in group})
            told = "different seeds" if seeds > 1 else "one seed: a copy, or arms that do the same"
            yield Problem(f"{names}: the same curves in every digit at {told}", serious=seeds > 1)


def _negative(grid: Sequence[Run], imported: bool) -> Iterator[Problem]:
    for run in grid:
        kl = run.outcome(schema.KL)
        if kl < -_ROUNDING:
            text = f"{layout.RESULTS}/{run.cell.id}.json: its KL is {kl:g}; a KL is not negative"
            yield Problem(text, serious=not imported)


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
    pairs: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in grid:
        pairs[run.point.beta_index, run.point.replicate].append(run)
    found: dict[str, set[str]] = defaultdict(set)
    for runs in pairs.values():
        settings = [run.settings for run in runs if run.settings]
        for key in {key for one in settings for key in one}:
            values = {one.get(key, "none") for one in settings}
            if len(values) > 1 and not any(f"{key}.".startswith(f"{change}.") for change in planned):
                found[key] |= values
    for key, values in sorted(found.items()):
        if key != _BETA:
            yield Problem(f"matched runs differ in {key}, which no arm changes: {', '.join(sorted(values))}")


def _configured(grid: Sequence[Run]) -> Iterator[Problem]:
    """Runs whose settings have another beta or estimator than their cell."""
    for run in grid:
        name, beta = f"{layout.RESULTS}/{run.cell.id}.json: its settings have", run.point.beta
        found = run.settings.get(_BETA)
        if found not in (None, str(beta), f"{beta:g}"):
            yield Problem(f"{name} {_BETA} = {found}, expected {beta:g}", serious=True)
        planned, found = run.cell.overrides.get(ESTIMATOR), run.settings.get(f"{ESTIMATOR}.class_path")
        if found is not None and isinstance(planned, str) and _class_name(found) != _class_name(planned):
            text = f"{name} {ESTIMATOR} = {_class_name(found)}, expected {_class_name(planned)}"
            yield Problem(text, serious=True)


def _class_name(path: str) -> str:
    """The name of a class that may be given with its package."""
    return path.rpartition(".")[2]


def _unlike(grid: Sequence[Run], what: str, of: Callable[[Run], str]) -> Iterator[Problem]:
    """A property in which runs should agree, with its values for each arm where they do not."""
    values = {label: sorted({of(run) for run in runs}) for label, runs in _by_arm(grid).items()}
    if len({value for own in values.values() for value in own if value}) > 1:
        told = "; ".join(f"{label} {', '.join(own)}" for label, own in values.items())
        yield Problem(f"the runs {what}: {told}")


def _last_steps(run: Run) -> str:
    steps = [
        curve.step[-1] for key, curve in run.curves.items() if key.startswith("train/") and len(curve.step)
    ]
    return f"{max(steps):g}" if steps else ""


def _versions(run: Run) -> str:
    return " ".join(f"{name} {version}" for name, version in sorted(run.versions.items()))


def _by_arm(grid: Iterable[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = defaultdict(list)
    for run in grid:
        arms[run.point.arm].append(run)
    return dict(sorted(arms.items()))
