"""How much of a matched pair's variance is noise of the evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.stats.intervals import Interval
from analysis.stats.pairs import FloatArray
from analysis.stats.text import whole_percent


@dataclass(frozen=True)
class NoiseShare:
    """The share of evaluation noise in the variance of a pair's difference.

    Attributes:
        value: The share, at most 1.
        interval: Its 95% interval.
    """

    value: float
    interval: Interval

    def __str__(self) -> str:
        low, high = map(whole_percent, self.interval.ends)
        return f"{whole_percent(self.value)} ({low} to {high})"


def noise_share(differences: Sequence[FloatArray]) -> NoiseShare | None:
    """The share of evaluation noise in the variance of a pair's difference.

    The difference of pair s on prompt p is d_sp = mean + a_s + b_p + e_sp: a_s is what the pair's runs differ
    in, b_p what all pairs share on the prompt, and e_sp the noise of the completions and the part of the
    pair's difference that is specific to the prompt. All pairs are evaluated on the same P prompts, hence

        Var(D_s) = Var(a) + Var(e) / P,    D_s = mean over p of d_sp.

    Var(e) / P is the noise of the evaluation, which more prompts or more completions reduce. It is estimated
    by the residuals d_sp - D_s - (mean over s of d_sp) + (mean of all d), with (S - 1)(P - 1) degrees of
    freedom; Var(D_s) by the sample variance over pairs. Both are summed over betas. The interval takes their
    ratio as F-distributed, which is exact for one beta and normal a and e; degrees of freedom after
    Satterthwaite.

    Args:
        differences: For each beta, differences of S pairs on P prompts, shape [S, P]. Betas with a single
            pair or prompt are left out.

    Returns:
        The share; None if there is nothing to estimate it from.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> runs, noise = rng.normal(size=(500, 1)), rng.normal(size=(500, 16))
        >>> found = noise_share([runs + 4 * noise])                # true share: (16 / 16) / (1 + 16 / 16)
        >>> bool(found.interval.low < 0.5 < found.interval.high)
        True
    """
    noise, total, noise_degrees, degrees = (
        np.array([_variances(one) for one in differences if min(one.shape) > 1], dtype=np.float64)
        .reshape(-1, 4)
        .T
    )
    if not total.sum() > 0:
        return None
    ratio = float(noise.sum() / total.sum())
    freedom = (
        (_satterthwaite(total, degrees), _satterthwaite(noise, noise_degrees)) if ratio > 0 else (1.0, 1.0)
    )
    low, high = np.minimum(1.0, ratio * stats.f.ppf([0.025, 0.975], *freedom))
    return NoiseShare(min(1.0, ratio), Interval(float(low), float(high), 0.95))


def _variances(differences: FloatArray) -> tuple[float, float, int, int]:
    """Variance of D_s from the evaluation, and in total, with their degrees of freedom."""
    pairs, prompts = differences.shape
    means = differences.mean(axis=1)
    residuals = differences - means[:, None] - differences.mean(axis=0) + differences.mean()
    free = (pairs - 1) * (prompts - 1)
    return float((residuals**2).sum()) / free / prompts, float(means.var(ddof=1)), free, pairs - 1


def _satterthwaite(variances: FloatArray, degrees: FloatArray) -> float:
    """Degrees of freedom of a sum of independent estimates of variances."""
    return float(variances.sum() ** 2 / (variances**2 / degrees).sum())
