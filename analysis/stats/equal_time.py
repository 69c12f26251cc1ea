"""Outcomes at equal time: every arm at the time at which the quickest one ends."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from analysis.results.records import Curve, Run
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import BoolArray, FloatArray, IntArray
from lit_klrb import schema

# Fewest evaluations between start and end of a run that is interpolated.
_FEWEST = 2
# Number of bootstrap samples.
SAMPLES = 2_000


@dataclass(frozen=True)
class AtEqualTime:
    """One arm at one beta, at the time at which the quickest arm of this beta ends.

    Attributes:
        label: The arm.
        beta_index: Index of the KL weight.
        ratio: Median over replicates of the time of its run, relative to the control's of the same replicate.
        range: The smallest and the largest of these.
        pairs: Their number.
        share: Share of its steps that a run has made by then: the smallest ratio of any arm over its own.
        step: The step that it has reached, a mean over its runs; None without evaluations.
        outcome: Mean over its runs of J, or of the KL where the plan decides by it, at this step; None if one
            of them has too few evaluations to be interpolated.
        difference: Mean over replicates of its outcome minus the control's, each at its own step, with an
            error that includes the noise of the times; None for the control, and if either has no outcome.
    """

    label: str
    beta_index: int
    ratio: float
    range: tuple[float, float]
    pairs: int
    share: float
    step: float | None
    outcome: Estimate | None
    difference: Estimate | None


def at_equal_time(sweep: Sweep) -> list[AtEqualTime]:
    """The arms whose times are known, by beta; a beta at which the control alone has times is left out."""
    control = sweep.plan.primary.control
    found = []
    for index in sweep.plan.grid.beta:
        ratios = {label: _ratios(sweep, label, index) for label in sweep.plan.grid.arms}
        medians = {label: float(np.median([*values.values()])) for label, values in ratios.items() if values}
        if len(medians) < 2:
            continue
        shares = {label: min(medians.values()) / ratio for label, ratio in medians.items()}
        curves = {label: _evaluations(sweep, label, index) for label in medians}
        outcomes = {label: _outcomes(curves[label], shares[label]) for label in medians}
        errors = joint_errors(ratios, {label: curves[label] for label in medians if outcomes[label]}, control)
        for label, ratio in medians.items():
            last = [curve.step[-1] for curve in curves[label].values() if len(curve.step)]
            values = outcomes[label]
            found.append(
                AtEqualTime(
                    label,
                    index,
                    ratio,
                    (min(ratios[label].values()), max(ratios[label].values())),
                    len(ratios[label]),
                    shares[label],
                    shares[label] * float(np.mean(last)) if last else None,
                    Estimate.of_mean(np.array(list(values.values()))) if values else None,
                    None if label == control else _difference(values, outcomes[control], errors.get(label)),
                )
            )
    return found


def value_at(curve: Curve, step: float) -> float | None:
    """The value of a curve at a step, interpolated linearly between its evaluations.

    Returns:
        The value; None if the step was not evaluated and either precedes the first evaluation, or is of a
        curve with fewer than two evaluations between its first and its last.

    Example:
        >>> steps = np.array([0.0, 10.0, 20.0, 30.0])
        >>> value_at(Curve(steps, np.array([0.0, 2.0, 3.0, 3.5])), 15.0)
        2.5
        >>> value_at(Curve(steps[::3], np.array([0.0, 3.5])), 15.0) is None
        True
    """
    evaluated = np.flatnonzero(curve.step == step)
    if len(evaluated):
        return float(curve.value[evaluated[0]])
    if len(curve.step) < 2 + _FEWEST or step < curve.step[0]:
        return None
    return float(np.interp(step, curve.step, curve.value))


def _runs(sweep: Sweep, label: str, index: int) -> dict[int, Run]:
    """The runs of an arm at one beta that did not diverge, by replicate."""
    return {
        replicate: run
        for (arm, beta_index, replicate), run in sweep.grid.items()
        if arm == label and beta_index == index and not run.diverged
    }


def _ratios(sweep: Sweep, label: str, index: int) -> dict[int, float]:
    """Replicate -> time of the arm's run relative to the control's, where both are known."""
    ours, theirs = (
        {s: time for s, run in _runs(sweep, arm, index).items() if (time := sweep.seconds.get(run.cell.id))}
        for arm in (label, sweep.plan.primary.control)
    )
    return {replicate: ours[replicate] / theirs[replicate] for replicate in ours.keys() & theirs.keys()}


def _evaluations(sweep: Sweep, label: str, index: int) -> dict[int, Curve]:
    """Replicate -> J, or the KL where the plan decides by it, at the common evaluations during training."""
    found = {}
    for replicate, run in _runs(sweep, label, index).items():
        kl, reward = (_finite(run, f"val/{key}") for key in (schema.KL, schema.REWARD))
        if sweep.plan.primary.outcome == schema.KL:
            found[replicate] = kl
            continue
        steps, ours, theirs = np.intersect1d(kl.step, reward.step, return_indices=True)
        found[replicate] = Curve(steps, reward.value[theirs] - run.point.beta * kl.value[ours])
    return found


def _finite(run: Run, key: str) -> Curve:
    curve = run.curves.get(key, Curve(np.zeros(0), np.zeros(0)))
    kept = np.isfinite(curve.value)
    return Curve(curve.step[kept], curve.value[kept])


def _outcomes(curves: Mapping[int, Curve], share: float) -> dict[int, float]:
    """Replicate -> outcome after a share of the steps; empty if one of them is unknown."""
    found = {}
    for replicate, curve in curves.items():
        if not len(curve.step) or (value := value_at(curve, share * float(curve.step[-1]))) is None:
            return {}
        found[replicate] = value
    return found


def _difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], error: float | None
) -> Estimate | None:
    pairs = sorted(ours.keys() & theirs.keys())
    if not pairs:
        return None
    found = Estimate.of_mean(np.array([ours[replicate] - theirs[replicate] for replicate in pairs]))
    return found if error is None or len(pairs) < 2 else replace(found, standard_error=error)


def joint_errors(
    ratios: Mapping[str, Mapping[int, float]], curves: Mapping[str, Mapping[int, Curve]], control: str
) -> dict[str, float]:
    """Standard errors of the differences to the control, over the noise of outcomes and of times.

    A bootstrap resamples replicates with their times and curves, so that the step at which arms are compared
    varies as it would if the sweep were repeated.
    """
    names = sorted({replicate for own in curves.values() for replicate in own})
    if control not in curves or len(names) < 2:
        return {}
    drawn = np.random.default_rng(0).integers(len(names), size=(SAMPLES, len(names)))
    times = {
        label: _medians(np.array([own.get(replicate, np.nan) for replicate in names]), drawn)
        for label, own in ratios.items()
        if own
    }
    least = np.min([*times.values()], axis=0)
    sampled = {
        label: np.array(
            [_at_shares(own.get(replicate), least / times[label]) for replicate in names]
        )  # [replicates, samples]
        for label, own in curves.items()
    }
    columns, scale = np.arange(SAMPLES), np.sqrt(len(names) / (len(names) - 1))
    found = {}
    for label in curves.keys() - {control}:
        differences = (sampled[label] - sampled[control])[drawn.T, columns]
        known = np.isfinite(differences).any(axis=0)
        found[label] = float(np.nanmean(differences[:, known], axis=0).std() * scale)
    return found


def _medians(values: FloatArray, drawn: IntArray) -> FloatArray:
    """The median of each sample of values, without those that are not known: [samples]."""
    known: BoolArray = np.asarray(np.isfinite(values), dtype=np.bool_)
    filled = np.where(known[drawn].any(axis=1, keepdims=True), values[drawn], np.median(values[known]))
    return np.asarray(np.nanmedian(filled, axis=1))


def _at_shares(curve: Curve | None, shares: FloatArray) -> FloatArray:
    """The curve after each share of its steps; `nan` without a curve."""
    if curve is None:
        return np.full(len(shares), np.nan)
    return np.asarray(np.interp(shares * float(curve.step[-1]), curve.step, curve.value))
