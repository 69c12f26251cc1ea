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

from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray, IntArray, Pairs
from analysis.stats.swaps import Alternative, SwapTest, p_values, sign_flip_test, swap_signs
from analysis.stats.text import number

LEAST_OVERLAP = 0.5
LEAST_SPREAD = 2.0
# With less than this share of its variance left, the label is a function of KL: the gap cannot be estimated.
_COLLINEAR = 1e-9
# Residuals below this share of the rewards are rounding errors of 0.
_ROUNDING = 1e-13


@dataclass(frozen=True, eq=False)
class MatchedKL:
    """The model fitted to matched pairs.

    Attributes:
        estimate: The gap in reward units with a t distribution; its standard error is clustered by swap unit
            and includes what the curve may miss. `nan` if refused.
        overlap: 1 - R^2 of the label on the curve without its last power: 1 if both arms have the same KLs,
            0 if the KL determines the arm; `nan` if a run diverged.
        refused: Why there is no estimate, or "".
        differences: Differences of the pairs' residuals from the curve, shape [P]; their mean is the gap.
        curve: Coefficients c0, c1, ... of the curve; fewer than four if there are few distinct KLs.
    """

    estimate: Estimate
    overlap: float
    refused: str
    differences: FloatArray
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
    model = _Model(pairs)
    gap, error, overlap = (float(found[0]) for found in model.fit(np.ones((1, model.units))))
    label = np.array([0.5, -0.5])
    curve = np.asarray(np.linalg.lstsq(model.design, (pairs.reward - gap * label).ravel(), rcond=None)[0])
    curve = curve.astype(np.float64)
    left = pairs.reward - (model.design @ curve).reshape(-1, 2)
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
    estimate = Estimate(gap, error, model.units - 1.0) if model.units > 1 else Estimate(gap)
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


def matched_kl_test(pairs: Pairs) -> SwapTest:
    """The swap test of the gap divided by its clustered standard error, both recomputed for every swap.

    The gap itself is not a valid statistic: swapped data have more overlap of the KLs than the observed data,
    so the variance of the gap under swaps is not that of the estimate.

    Args:
        pairs: Pairs without diverged runs.
    """
    model = _Model(pairs)
    return sign_flip_test(model.units, model.statistic)


def matched_kl_p_value(
    pairs: Pairs, *, alternative: Alternative = "two-sided", resamples: int = 999, seed: int = 0
) -> float:
    """The p-value of the same test, for simulations."""
    model = _Model(pairs)
    signs, exact = swap_signs(model.units, resamples, seed)
    observed, null = model.statistic(np.ones((1, model.units)))[0], model.statistic(signs)
    return float(p_values(observed, null, alternative, exact=exact, tolerance=2.0**-32))


def curve_design(kl: FloatArray) -> FloatArray:
    """Columns 1, sqrt(KL), KL, KL^1.5 of the curve, shape [N, 4].

    A power needs two more distinct KLs than the one before, the first one four: a curve through every point
    would leave no residuals.
    """
    root = np.sqrt(np.maximum(kl, 0.0))
    degree = min(3, len(np.unique(root)) // 2 - 1)
    return np.asarray(np.polynomial.polynomial.polyvander(root, max(0, degree)))


class _Model:
    """The model for many labellings at once, with an error for what the curve may miss.

    A frontier with a narrow hump is none of these curves: the difference between the gap and that of a curve
    with one power less is added to the standard error, in quadrature.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.design = curve_design(pairs.kl.ravel())
        self._full = _Fit(pairs, self.design)
        self.units = self._full.units
        less = self.design[:, :-1]
        self._simpler = _Fit(pairs, less) if less.shape[1] > 1 else None

    def fit(self, signs: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Gap, its standard error, and overlap, for signs [N, units]; shape [N] each."""
        product, score, length = self._full.sums(signs)
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = product / length
            error = np.hypot(score, self._misfit(signs, gap) * length) / length
        overlap = 2 * (self._simpler or self._full).sums(signs)[2] / self._full.pairs
        return gap, error, overlap

    def statistic(self, signs: FloatArray) -> FloatArray:
        """The gap over its standard error, shape [...] for signs [..., units]; antisymmetric in the signs."""
        flat = signs.reshape(-1, self.units)
        product, score, length = self._full.sums(flat)
        usable = length > _COLLINEAR * self._full.pairs
        gap = product / np.where(usable, length, 1.0)
        error = np.hypot(score, self._misfit(flat, gap) * length)
        found = np.where(usable, product / np.maximum(error, self._full.floor), 0.0)
        return np.asarray(found.reshape(signs.shape[:-1]))

    def _misfit(self, signs: FloatArray, gap: FloatArray) -> FloatArray:
        """Difference between the gap and that of the simpler curve; 0 without one."""
        if self._simpler is None:
            return np.zeros_like(gap)
        product, _, length = self._simpler.sums(signs)
        return np.asarray(gap - product / np.maximum(length, _COLLINEAR * self._full.pairs))


class _Fit:
    """Least squares by partial regression.

    With Q an orthonormal basis of the curve's columns, M = 1 - QQ', l = M label and r = M R, the gap is
    l'r / l'l, and the residual of the model is r - gap l.
    """

    def __init__(self, pairs: Pairs, design: FloatArray) -> None:
        # Scaled columns, so that the numerical rank does not depend on the unit of KL
        scaled = design / np.abs(design).max(axis=0)
        left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
        basis = left[:, sizes > 1e-10 * sizes[0]]
        reward = pairs.reward.ravel()
        rest = reward - basis @ (basis.T @ reward)
        rest[np.abs(rest) <= _ROUNDING * np.abs(reward).max()] = 0.0
        self._basis = basis.reshape(len(pairs), 2, -1)
        self._rest = rest.reshape(-1, 2)
        names, self._place = np.unique(pairs.unit, return_inverse=True)
        self.units, self.pairs = len(names), len(pairs)
        self._members: IntArray | None = None if self.units == len(pairs) else np.arange(self.units)
        free = max(1, 2 * len(pairs) - basis.shape[1] - 1)
        self._correction = self.units / max(1, self.units - 1) * (2 * len(pairs) - 1) / free
        self.floor = 1e-9 * (float(np.abs(rest).max(initial=0.0)) or 1.0) * math.sqrt(2 * len(pairs))

    def sums(self, signs: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """l'r, the root of the summed squared cluster scores, and l'l; shape [N] each."""
        turned = signs[:, self._place]
        ours, theirs = self._basis[:, 0], self._basis[:, 1]
        on_curve = turned @ (ours - theirs) / 2
        length = len(self._rest) / 2 - (on_curve**2).sum(axis=1)
        product = turned @ (self._rest[:, 0] - self._rest[:, 1]) / 2
        first, second = turned / 2 - on_curve @ ours.T, -turned / 2 - on_curve @ theirs.T
        gap = product / np.maximum(length, _COLLINEAR * len(self._rest))
        scores = first * self._rest[:, 0] + second * self._rest[:, 1] - gap[:, None] * (first**2 + second**2)
        if self._members is not None:
            scores = scores @ (self._place[:, None] == self._members)
        return product, np.sqrt(self._correction * (scores**2).sum(axis=1)), length
