"""The reward at matched KL: the difference in reward between two arms at the same KL.

The model R = c0 + c1 sqrt(KL) + c2 KL + gap * label is fitted by least squares to the runs of both arms, with
label 1/2 for the treatment and -1/2 for the control. A curve fitted without the label would pass between the
arms where their KLs differ, and absorb a part of the gap.
"""

import math
from dataclasses import dataclass

import numpy as np

from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray, IntArray, Pairs
from analysis.stats.swaps import RESAMPLES, Alternative, SwapTest, p_values, sign_flip_test, swap_signs

LEAST_OVERLAP = 0.5
# With less than this share of its variance left, the label is a function of KL: the gap cannot be estimated.
_COLLINEAR = 1e-9
# Residuals below this share of the rewards are rounding errors of 0.
_ROUNDING = 1e-13


@dataclass(frozen=True, eq=False)
class MatchedKL:
    """The model fitted to matched pairs.

    Attributes:
        estimate: The gap in reward units with a t distribution; its standard error is clustered by swap unit.
            `nan` if refused.
        overlap: 1 - R^2 of the label on the curve: 1 if both arms have the same KLs, 0 if the KL determines
            the arm; `nan` if a run diverged.
        refused: Why there is no estimate, or "".
        differences: Differences of the pairs' residuals from the curve, shape [P]; their mean is the gap.
        curve: Coefficients c0, c1, ... of the curve; fewer than three if there are few distinct KLs.
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
        >>> zeros, index = np.zeros(6, dtype=np.int64), np.arange(6)
        >>> kl = np.linspace(1, 2, 6)[:, None] * np.ones(2)
        >>> pairs = Pairs("a", "b", np.ones(6), zeros, index, index, kl, np.sqrt(kl) + np.array([0.3, 0.0]))
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
    if overlap < least_overlap:
        refused = f"their KLs do not overlap (overlap {overlap:.2f}, {least_overlap:g} is needed)"
        return MatchedKL(Estimate(math.nan), overlap, refused, left[:, 0] - left[:, 1], curve)
    estimate = Estimate(gap, error, model.units - 1.0) if model.units > 1 else Estimate(gap)
    return MatchedKL(estimate, overlap, "", left[:, 0] - left[:, 1], curve)


def matched_kl_test(pairs: Pairs, *, resamples: int = RESAMPLES) -> SwapTest:
    """The swap test of the gap divided by its clustered standard error, both recomputed for every swap.

    The gap itself is not a valid statistic: swapped data have more overlap of the KLs than the observed data,
    so the variance of the gap under swaps is not that of the estimate.

    Args:
        pairs: Pairs without diverged runs.
        resamples: Number of random swaps if enumeration would need more.
    """
    model = _Model(pairs)
    return sign_flip_test(model.units, model.statistic, resamples=resamples)


def matched_kl_p_value(
    pairs: Pairs, *, alternative: Alternative = "two-sided", resamples: int = 999, seed: int = 0
) -> float:
    """The p-value of the same test, for simulations."""
    model = _Model(pairs)
    signs, exact = swap_signs(model.units, resamples, seed)
    observed, null = model.statistic(np.ones((1, model.units)))[0], model.statistic(signs)
    return float(p_values(observed, null, alternative, exact=exact, tolerance=2.0**-32))


def curve_design(kl: FloatArray) -> FloatArray:
    """Columns 1, sqrt(KL), KL of the curve, shape [N, 3].

    With fewer than six distinct KLs the curve is a line, with fewer than four a constant: a curve through
    every point would leave no residuals.
    """
    root = np.sqrt(np.maximum(kl, 0.0))
    distinct = len(np.unique(root))
    return np.asarray(np.polynomial.polynomial.polyvander(root, 2 if distinct >= 6 else int(distinct >= 4)))


class _Model:
    """Least squares by partial regression, for many labellings at once.

    With Q an orthonormal basis of the curve's columns, M = 1 - QQ', l = M label and r = M R, the gap is
    l'r / l'l, and the residual of the model is r - gap l.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.design = curve_design(pairs.kl.ravel())
        # Scaled columns, so that the numerical rank does not depend on the unit of KL
        scaled = self.design / np.abs(self.design).max(axis=0)
        left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
        basis = left[:, sizes > 1e-10 * sizes[0]]
        reward = pairs.reward.ravel()
        rest = reward - basis @ (basis.T @ reward)
        rest[np.abs(rest) <= _ROUNDING * np.abs(reward).max()] = 0.0
        self._basis = basis.reshape(len(pairs), 2, -1)
        self._rest = rest.reshape(-1, 2)
        names, self._place = np.unique(pairs.unit, return_inverse=True)
        self.units = len(names)
        self._members: IntArray | None = None if self.units == len(pairs) else np.arange(self.units)
        runs = 2 * len(pairs)
        free = max(1, runs - basis.shape[1] - 1)
        self._correction = self.units / max(1, self.units - 1) * (runs - 1) / free
        self._floor = 1e-9 * (float(np.abs(rest).max(initial=0.0)) or 1.0) * math.sqrt(runs)

    def fit(self, signs: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Gap, its clustered standard error, and overlap, for signs [N, units]; shape [N] each."""
        product, score, length = self._sums(signs)
        with np.errstate(divide="ignore", invalid="ignore"):
            return product / length, score / length, 2 * length / len(self._rest)

    def statistic(self, signs: FloatArray) -> FloatArray:
        """The gap over its standard error, shape [...] for signs [..., units]; antisymmetric in the signs."""
        product, score, length = self._sums(signs.reshape(-1, self.units))
        usable = length > _COLLINEAR * len(self._rest)
        found = np.where(usable, product / np.maximum(score, self._floor), 0.0)
        return np.asarray(found.reshape(signs.shape[:-1]))

    def _sums(self, signs: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
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
