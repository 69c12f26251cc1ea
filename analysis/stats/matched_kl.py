"""The reward at matched KL: the difference in reward between two arms at the same KL.

The model R = c0 + c1 sqrt(KL) + c2 KL + c3 KL^1.5 + gap * label is fitted by least squares to the runs of
both arms, with label 1/2 for the treatment and -1/2 for the control. A curve fitted without the label would
pass between the arms where their KLs differ, and absorb a part of the gap. Without the last power, and an
error for what the curve may miss, intervals cover too rarely where the reward first rises and then falls with
the KL (`python -m benchmarks certificates`).

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
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.text import number

LEAST_OVERLAP = 0.5
LEAST_SPREAD = 2.0
_LABEL = np.array([0.5, -0.5])
# With less than this share of its variance left, the label is a function of KL: the gap cannot be estimated.
_COLLINEAR = 1e-9
# Residuals below this share of the rewards are rounding errors of 0.
_ROUNDING = 1e-13


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
    # Differences of the pairs' residuals from the curve, shape [P]; their mean is the gap
    differences: FloatArray
    # Coefficients c0, c1, ... of the curve; fewer than four if there are few distinct KLs
    curve: FloatArray


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
    diverged = int(pairs.diverged.sum())
    if diverged or not len(pairs):
        nothing = np.full(len(pairs), math.nan)
        reason = f"{diverged} of the runs diverged and have no KL" if diverged else "there are no pairs"
        return MatchedKL(Estimate(math.nan), math.nan, reason, nothing, np.zeros(1))
    design = curve_design(pairs.kl.ravel())
    gap, error, overlap = _fit(pairs, design)
    if design.shape[1] > 1:
        # A frontier with a narrow hump is none of these curves: what one power less changes is an error, too
        simpler, _, overlap = _fit(pairs, design[:, :-1])
        error = math.hypot(error, gap - simpler)
    label = 0.0 if math.isnan(gap) else gap * _LABEL
    curve = np.linalg.lstsq(design, (pairs.reward - label).ravel(), rcond=None)[0].astype(np.float64)
    left = pairs.reward - (design @ curve).reshape(-1, 2)
    between, within = kl_spread(pairs)
    refused = ""
    if not between > LEAST_SPREAD * within:
        refused = (
            "with one beta its slope is noise between replicates; 2 betas are needed"
            if len(pairs.beta_indices) == 1
            else f"the SD of the KL is {number(between)} nats between betas and {number(within)} between "
            f"replicates: with at most {LEAST_SPREAD:g} times that its slope may be noise"
        )
    elif overlap < least_overlap:
        refused = f"their KLs do not overlap (overlap {overlap:.2f}, {least_overlap:g} is needed)"
    if refused:
        return MatchedKL(Estimate(math.nan), overlap, refused, left[:, 0] - left[:, 1], curve)
    units = len(np.unique(pairs.unit))
    estimate = Estimate(gap, error, units - 1.0) if units > 1 else Estimate(gap)
    return MatchedKL(estimate, overlap, "", left[:, 0] - left[:, 1], curve)


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


def _fit(pairs: Pairs, design: FloatArray) -> tuple[float, float, float]:
    """Gap, its clustered standard error, and overlap; `nan` if KL determines the arm."""
    # Scaled columns, so that the numerical rank does not depend on the unit of KL
    left, sizes, _ = np.linalg.svd(design / np.abs(design).max(axis=0), full_matrices=False)
    basis, label = left[:, sizes > 1e-10 * sizes[0]], np.tile(_LABEL, len(pairs))
    overlap = min(1.0, 1 - float(OLS(label, basis).fit().rsquared))
    if overlap <= _COLLINEAR:
        return math.nan, math.nan, 0.0
    reward, units = pairs.reward.ravel(), np.repeat(pairs.unit, 2)
    rest = reward - basis @ (basis.T @ reward)
    rest[np.abs(rest) <= _ROUNDING * np.abs(reward).max()] = 0.0
    clusters = {"groups": units, "use_correction": len(np.unique(units)) > 1}
    model = OLS(rest, np.column_stack([basis, label])).fit(cov_type="cluster", cov_kwds=clusters)
    return float(model.params[-1]), float(model.bse[-1]), overlap
