"""Checks of what runs logged: copies, starts that differ, ends that are not the results."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeVar

import numpy as np

from analysis.results.plan import Plan
from analysis.results.records import Curve, Run, Values
from analysis.results.sweep import Problem
from lit_klrb import schema

Item = TypeVar("Item")
Key = TypeVar("Key")
# Runs with this share of their values in common, up to one factor and to rounding, are copies; runs of other
# seeds have at most .3 in published sweeps.
_COPIED, _ALIKE = 0.5, 2e-5
# Values of a curve with fewer significant digits may agree by chance; so may the results of a whole run, of
# which there are only two.
_DIGITS, _DIGITS_OF_RESULTS = 4, 6
# Shortest curve that identifies a run.
_SHORTEST = 4
_METRICS = (schema.REWARD, schema.KL)
# Largest difference of two evaluations that are one, relative to the value, as curves are rounded; and in
# standard errors, which are of the same completions.
_ROUNDING, _OF_ERROR = 1e-4, 0.1


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Runs or cells by what they have in common."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def by_arm(runs: Iterable[Run]) -> list[tuple[str, list[Run]]]:
    """The runs of each arm, arms sorted by label."""
    return sorted(grouped(runs, lambda run: str(run.cell.arm)).items())


def listed(values: Mapping[str, Iterable[str]]) -> str:
    """The values of each arm, in words."""
    return "; ".join(f"{arm} {', '.join(each)}" for arm, each in values.items())


def suspicious_traces(runs: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Problems of the curves and results of runs of arms, diverged ones included."""
    trained = [run for run in runs if not run.diverged]
    yield from _copies(trained)
    yield from _same_weights(trained)
    yield from _other_results(trained)
    yield from _not_diverged(runs, trained)
    yield from _other_starts([run for run in runs if run.cell.point is not None], plan)


def _copies(runs: Sequence[Run]) -> Iterator[Problem]:
    """Runs most of whose values are those of another run, at another seed also these times one factor.

    With the same seed, two arms may do the same. In the tuning stage they do so often, at small rates.
    """
    traces = {run.cell.id: _trace(run) for run in runs}
    for same in grouped(runs, lambda run: traces[run.cell.id][0]).values():
        values = np.array([traces[run.cell.id][1] for run in same])
        seeds = np.array([run.cell.seed for run in same])
        for index in range(1, len(same)):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = values[:index] / values[index]
            ratios[~np.isfinite(ratios)] = np.nan
            other = seeds[:index] != seeds[index]
            known = np.isfinite(ratios).any(axis=1) & other & (values.shape[1] > len(_METRICS))
            factors = np.ones((index, 1))
            factors[known] = np.nanmedian(ratios[known], axis=1, keepdims=True) if known.any() else 1.0
            tolerance = np.where(other[:, None], _ALIKE * np.abs(factors), 0.0)
            shares = (np.abs(ratios - factors) <= tolerance).mean(axis=1)
            first = int(shares.argmax())
            alike = not other[first] and same[index].cell.point is None
            if shares[first] >= _COPIED and not alike:
                yield _copy(
                    same[index], same[first], shares[first], values.shape[1], float(factors[first, 0])
                )


def _copy(run: Run, other: Run, share: float, total: int, factor: float) -> Problem:
    seeds = run.cell.seed != other.cell.seed
    what = "values of its KL" if total > len(_METRICS) else "results"
    times = "" if abs(factor - 1) < _ALIKE else f", times {factor:.6g}"
    text = f"{run.file}: {round(share * total)} of {total} {what} are those of {other.file}{times}"
    why = "at another seed: a copy" if seeds else "at one seed: a copy, or arms that do the same"
    serious = seeds and (total > len(_METRICS) or share > _COPIED)  # one of two results may agree
    return Problem(f"{text}, {why}", serious=serious, kind=f"a copy, {why}")


def _trace(run: Run) -> tuple[bytes, Values]:
    """Steps and values of a run's logged KL, or its results if it has no curve; `nan` if imprecise."""
    curve = run.curves.get(f"train/{schema.KL}")
    if curve is not None and len(curve.value) >= _SHORTEST:
        # All arms of a seed begin with the same rollout, at each step on it
        later = np.cumsum(curve.value != curve.value[0]) > 0
        return curve.step.tobytes(), np.where(later, _precise(curve.value, _DIGITS), np.nan)
    return b"", _precise(np.array([run.outcome(key) for key in _METRICS]), _DIGITS_OF_RESULTS)


def _precise(values: Values, digits: int) -> Values:
    """The values, `nan` in place of those with fewer significant digits.

    Example:
        >>> _precise(np.array([0.1234, 12.0, 0.0]), digits=4).tolist()
        [0.1234, nan, nan]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 10.0 ** (np.floor(np.log10(np.abs(values))) - digits + 2)
        part = values / unit
        return np.asarray(np.where(np.abs(part - np.round(part)) > 1e-6, values, np.nan))


def _same_weights(runs: Sequence[Run]) -> Iterator[Problem]:
    """Runs with the same weights that have different seeds, or other results: copies, or never trained."""
    for weights, group in grouped(runs, lambda run: run.weights).items():
        seeds = len({run.cell.seed for run in group})
        results = {tuple(run.outcome(key) for key in _METRICS) for run in group if run.cell.point}
        if weights and max(seeds, len(results)) > 1:
            of = f"of {seeds} seeds" if seeds > 1 else "with different results"
            text = f"{len(group)} runs {of} have the same weights, {schema.WEIGHTS} {weights[:12]}"
            yield Problem(text, serious=True, kind="the same weights")


def _other_results(runs: Sequence[Run]) -> Iterator[Problem]:
    """Runs whose results are not their last evaluation."""
    for run, key in product(runs, _METRICS):
        curve, result = run.curves.get(f"val/{key}"), run.outcome(key)
        if curve is not None and len(curve.value):
            last = curve.value[-1]
            if not abs(last - result) <= _ROUNDING * max(abs(last), abs(result)):
                text = f"{run.file}: its {key} is {result:g}, but {last:g} at its last evaluation"
                yield Problem(text, serious=True, kind=f"another {key} than evaluated")


def _not_diverged(runs: Sequence[Run], trained: Sequence[Run]) -> Iterator[Problem]:
    """Runs without results that were evaluated after the last step of the others."""
    ends = {curve.step[-1] for run in trained for curve in _evaluations(run)}
    for run in runs:
        values = [curve.value[-1] if curve.step[-1] in ends else np.nan for curve in _evaluations(run)]
        if run.diverged and values and np.isfinite(values).all():
            text = f"{run.file}: has no reward or no KL, though its last evaluation has both"
            yield Problem(f"{text}: it did not diverge", serious=True, kind="not diverged")


def _other_starts(grid: Sequence[Run], plan: Plan) -> Iterator[Problem]:
    """Runs of a pair whose evaluations before the first step differ, which are of one policy.

    Not where arms start from policies of their own, or where the runs of a pair have other versions.
    """
    arms = [key for overrides in plan.grid.arms.values() for key in overrides]
    if any(".policy" in key for key in arms):
        return
    for runs in grouped(grid, lambda run: (run.cell.seed, *run.point[1:], str(run.versions))).values():
        for key in _METRICS:
            starts = {run.point.arm: run.first(key) for run in runs}
            if not _alike([*starts.values()], runs[0].standard_error(key)):
                each = ", ".join(f"{arm} {'none' if v is None else f'{v:g}'}" for arm, v in starts.items())
                where = f"β = {runs[0].point.beta:g}, replicate {runs[0].point.replicate}"
                text = f"the {key} before the first step differs between arms, at {where}: {each}"
                why = "one policy was evaluated in several ways, or on several data"
                yield Problem(f"{text}; {why}", serious=True, kind=f"{key} of the start")


def _alike(values: Sequence[float | None], error: float) -> bool:
    """Whether evaluations are those of one policy; None if there was none.

    Args:
        values: The evaluations.
        error: Their standard error; `nan` if unknown.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return not known
    allowed = np.fmax(_OF_ERROR * error, _ROUNDING * max(map(abs, known)))
    return bool(max(known) - min(known) <= allowed)


def _evaluations(run: Run) -> list[Curve]:
    """The curves of what was evaluated."""
    curves = (run.curves.get(f"val/{key}") for key in _METRICS)
    return [curve for curve in curves if curve is not None and len(curve.step)]
