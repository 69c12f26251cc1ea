"""Outcomes during training: differences at each evaluation, and how early the control's end is reached."""

import numpy as np

from analysis.stats.contrast import Contrast, equal_betas, mean_of
from analysis.stats.intervals import Estimate, jackknife_error
from analysis.stats.pairs import Curves, FloatArray
from lit_klrb import schema


def differences(evaluations: Curves) -> list[Estimate]:
    """Mean difference, treatment - control, at each evaluation; each beta counts the same."""
    pairs, weights = evaluations.pairs, equal_betas(evaluations.pairs)
    found = (evaluations.values[:, 0] - evaluations.values[:, 1]).T
    return [mean_of(Contrast(each, weights, "", ranked=False), pairs) for each in found]


def reached(evaluations: Curves, beta_index: int) -> Estimate | None:
    """The step at which the treatment's mean is as good as the mean with which the control ends, at one beta.

    Both means are over replicates; between two evaluations the treatment's is interpolated linearly. The
    standard error is that of the jackknife over replicates.

    Args:
        evaluations: J = reward - beta * KL, or the KL where the plan decides by it, in evaluations.
        beta_index: Index of the KL weight.

    Returns:
        The step; without a standard error if there are fewer than three replicates, or if it is not reached
        without one of them. None if it is not reached.
    """
    sign = -1.0 if evaluations.metric == schema.KL else 1.0
    members = sign * evaluations.values[evaluations.pairs.beta_index == beta_index]
    step = _crossing(evaluations.steps, members)
    if step is None or len(members) < 3:
        return None if step is None else Estimate(step)
    left_out = [_crossing(evaluations.steps, np.delete(members, i, axis=0)) for i in range(len(members))]
    if None in left_out:
        return Estimate(step)
    return Estimate(step, jackknife_error(np.array(left_out, dtype=np.float64)), len(members) - 1.0)


def _crossing(steps: FloatArray, members: FloatArray) -> float | None:
    """The first step where the mean of column 0 of [S, 2, T] is not below the last mean of column 1."""
    ours, theirs = members.mean(axis=0)
    above = np.flatnonzero(ours >= theirs[-1])
    if not len(above):
        return None
    last = int(above[0])
    around = slice(max(0, last - 1), last + 1)
    return float(np.interp(theirs[-1], ours[around], steps[around]))
