"""The reward at matched KL: the difference in reward between two arms at the same KL, described.

The model R = c0 + c1 sqrt(KL) + c2 KL + c3 KL^1.5 + gap * label is fitted by least squares to the runs of
both arms, with label 1/2 for the treatment and -1/2 for the control. A curve fitted without the label would
pass between the arms where their KLs differ, and absorb a part of the gap. Without the last power, and an
error for what the curve may miss, intervals cover too rarely where the reward first rises and then falls with
the KL (`python -m benchmarks certificates`). It describes what was found, and no verdict rests on it.

Where the KL moves little between betas, the slope of the curve is that of noise between replicates, which
need not be the slope along which arms move apart. There is no estimate unless the spread of the mean KL
between betas exceeds `LEAST_SPREAD` times that of runs of one arm at one beta, see `kl_spread`; with one beta
there is none. The factor is for noise in the KL that earns no reward: with two betas, eight replicates and a
KL ratio of .85, intervals of 95 % cover in .31 of sweeps whose spread is .5 to 1 times that within, in .65
with 1 to 1.5, in .77 with 1.5 to 2, and in .85 with more.
"""

import math
from dataclasses import dataclass

import numpy as np
from statsmodels.regression.linear_model import OLS

from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray, IntArray, Pairs

LEAST_OVERLAP = 0.5
LEAST_SPREAD = 2.0
_LABEL = np.array([0.5, -0.5])


@dataclass(frozen=True, eq=False)
class MatchedKL:
    """The model fitted to matched pairs."""

    # The gap in reward units with a t distribution; its standard error is clustered by swap unit and includes
    # what the curve may miss. `nan` if refused.
    estimate: Estimate
    # 1 - R^2 of the label on the curve without its last power: 1 if both arms have the same KLs, 0 if the KL
    # determines the arm; `nan` if a run diverged
    overlap: float
    refused: str  # why there is no estimate, or ""


def matched_kl(pairs: Pairs, *, least_overlap: float = LEAST_OVERLAP) -> MatchedKL:
    """Fit the model.

    Args:
        pairs: The matched pairs.
        least_overlap: The overlap below which there is no estimate.

    Example:
        >>> index = np.arange(6)
        >>> kl = (1 + index % 2 + index / 10)[:, None] * np.ones(2)
        >>> reward = np.sqrt(kl) + np.array([0.3, 0.0])
        >>> pairs = Pairs("a", "b", 1.0 + index % 2, index % 2, index, index, kl, reward)
        >>> round(matched_kl(pairs).estimate.value, 6), matched_kl(pairs).overlap
        (0.3, 1.0)
    """
    nothing = Estimate(math.nan)
    if pairs.diverged.any() or not len(pairs):
        return MatchedKL(nothing, math.nan, "a run diverged and has no KL" if len(pairs) else "no pairs")
    design = curve_design(pairs.kl.ravel())
    simpler = design[:, :-1] if design.shape[1] > 1 else design
    label, between = np.tile(_LABEL, len(pairs)), kl_spread(pairs)
    overlap = min(1.0, 1 - float(OLS(label, simpler).fit().rsquared))
    if len(pairs.beta_indices) == 1:
        return MatchedKL(nothing, overlap, "with one beta its slope is noise between replicates")
    if not between[0] > LEAST_SPREAD * between[1]:
        why = f"the KL varies between betas by at most {LEAST_SPREAD:g} times its spread between replicates"
        return MatchedKL(nothing, overlap, why)
    if overlap < least_overlap:
        return MatchedKL(nothing, overlap, f"the KLs of the arms overlap by less than {least_overlap:g}")
    groups = np.repeat(np.unique(pairs.unit, return_inverse=True)[1], 2)
    (gap, error), (other, _) = (_gap(pairs, columns, label, groups) for columns in (design, simpler))
    # A frontier with a narrow hump is none of these curves: what one power less changes is an error, too
    return MatchedKL(Estimate(gap, math.hypot(error, gap - other), groups.max()), overlap, "")


def _gap(pairs: Pairs, design: FloatArray, label: FloatArray, groups: IntArray) -> tuple[float, float]:
    """The coefficient of the label, and its standard error, clustered by groups."""
    scaled = design / np.abs(design).max(axis=0)  # so that the numerical rank does not depend on the unit
    clusters = {"groups": groups, "use_correction": groups.max() > 0}
    model = OLS(pairs.reward.ravel(), np.column_stack([scaled, label]))
    fit = model.fit(cov_type="cluster", cov_kwds=clusters)
    return float(fit.params[-1]), float(fit.bse[-1])


def kl_spread(pairs: Pairs) -> tuple[float, float]:
    """Standard deviations of the KL in nats: between betas, and between runs of one arm at one beta.

    The first is of the betas' mean KLs, each the mean of both arms; 0 with one beta. The second is pooled:
    the root of the mean over arms and betas of the variance between replicates; 0 with one replicate.

    Example:
        >>> kl = np.array([[1.0, 3.0], [1.0, 3.0], [5.0, 7.0], [5.0, 7.0]])
        >>> place, beta = np.arange(4), np.array([0, 0, 1, 1])
        >>> kl_spread(Pairs("a", "b", beta + 1.0, beta, place, place, kl, kl))
        (2.8284271247461903, 0.0)
    """
    cells = [pairs.kl[pairs.beta_index == index] for index in pairs.beta_indices]
    means = np.array([cell.mean() for cell in cells])
    variances = [cell.var(axis=0, ddof=1).mean() for cell in cells if len(cell) > 1]
    between = float(means.std(ddof=1)) if len(means) > 1 else 0.0
    return between, math.sqrt(np.mean(variances)) if variances else 0.0


def curve_design(kl: FloatArray) -> FloatArray:
    """Columns 1, sqrt(KL), KL, KL^1.5 of the curve, shape [N, 4].

    A power needs two more distinct KLs than the one before, the first one four: a curve through every point
    would leave no residuals.
    """
    root = np.sqrt(np.maximum(kl, 0.0))
    degree = min(3, len(np.unique(root)) // 2 - 1)
    return np.asarray(np.polynomial.polynomial.polyvander(root, max(0, degree)))
