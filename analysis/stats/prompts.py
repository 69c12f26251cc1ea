"""What an evaluation on few prompts adds to the error of a difference, and to the spread of pairs.

The difference of pair s on prompt q is d_sq = mean + a_s + b_q + e_sq: a_s is what the pair's runs differ in,
b_q what all pairs share on the prompt, and e_sq the noise of the completions and the part of the pair's
difference that is specific to the prompt. All S pairs are evaluated on the same Q prompts, so that

    Var(D_s) = Var(a) + Var(e) / Q,    D_s = mean over q of d_sq.

Var(e) is estimated by the residuals d_sq - D_s - (mean over s of d_sq) + (mean of all d), with (S - 1)(Q - 1)
degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.stats.contrast import Contrast
from analysis.stats.intervals import Estimate, Interval, weighted_sum
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.text import whole_percent


def _noise(differences: FloatArray) -> float:
    """Var(e) / Q of differences [S, Q]: what the evaluation adds to the variance of a pair's difference."""
    pairs, prompts = differences.shape
    residuals = differences - differences.mean(axis=1, keepdims=True) - differences.mean(axis=0)
    free = max(1, pairs - 1) * (prompts - 1)
    return float(np.square(residuals + differences.mean()).sum() / free / prompts)


def over_prompts(estimate: Estimate, contrast: Contrast, pairs: Pairs) -> Estimate | None:
    """An estimate whose error is that of seeds and of prompts.

    The estimate's standard error has Var(a) and Var(e). The variance of the weighted mean of each prompt,
    divided by Q, has Var(b) and Var(e); that of e is subtracted once. Degrees of freedom are Satterthwaite's.

    Args:
        estimate: The mean of the contrast, with its error over seeds.
        contrast: The differences.
        pairs: Their pairs, with the differences on each prompt.

    Returns:
        The estimate; None without values per prompt, or of ranks.

    Example:
        >>> place, both = np.arange(2), np.ones((2, 2))
        >>> prompts = np.array([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]])       # pairs and prompts add up
        >>> pairs = Pairs("a", "b", both[0], 0 * place, place, place, both, both, prompts=prompts)
        >>> contrast = Contrast(prompts.mean(axis=1), np.ones(2), "", ranked=False)
        >>> found = over_prompts(Estimate.of_mean(contrast.values), contrast, pairs)
        >>> round(found.standard_error**2, 6), round(1 / 4 + 1 / 3, 6)
        (0.583333, 0.583333)
    """
    values = pairs.prompts
    if values is None or contrast.ranked or values.shape[1] < 2 or not np.isfinite(values).all():
        return None
    count = values.shape[1]
    weights = contrast.weights / contrast.weights.sum()
    strata = [pairs.stratum == stratum for stratum in np.unique(pairs.stratum)]
    noise = sum(float((weights[mask] ** 2).sum()) * _noise(values[mask]) for mask in strata)
    prompts = float((weights @ values).var(ddof=1)) / count
    if prompts <= noise or not estimate.degrees > 0:
        return estimate
    seeds = estimate.standard_error**2
    total = seeds + prompts - noise
    degrees = total**2 / (seeds**2 / estimate.degrees + prompts**2 / (count - 1))
    return replace(estimate, standard_error=math.sqrt(total), degrees=degrees)


@dataclass(frozen=True)
class NoiseShare:
    """The share of evaluation noise in the variance of a pair's difference."""

    value: float  # the share, at most 1
    interval: Interval  # its 95% interval

    def __str__(self) -> str:
        low, high = map(whole_percent, self.interval.ends)
        return f"{whole_percent(self.value)} ({low} to {high})"


def noise_share(differences: Sequence[FloatArray]) -> NoiseShare | None:
    """The share of evaluation noise, Var(e) / Q, in Var(D_s), both summed over betas.

    More prompts or more completions reduce it. The interval takes the ratio as F-distributed, which is exact
    for one beta and normal a and e; degrees of freedom after Satterthwaite.

    Args:
        differences: For each beta, differences of S pairs on Q prompts, shape [S, Q]. Betas with a single
            pair or prompt are left out.

    Returns:
        The share; None if there is nothing to estimate it from.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> runs, noise = rng.normal(size=(500, 1)), rng.normal(size=(500, 16))
        >>> share = noise_share([runs + 4 * noise])                # true share: (16 / 16) / (1 + 16 / 16)
        >>> bool(share.interval.low < 0.5 < share.interval.high)
        True
    """
    known = [one for one in differences if min(one.shape) > 1]
    free = [(len(one) - 1, one.shape[1] - 1) for one in known]
    spreads = [float(one.mean(axis=1).std(ddof=1)) for one in known]
    total = weighted_sum([(1.0, Estimate(0.0, sd, s)) for sd, (s, _) in zip(spreads, free, strict=True)])
    if not total.standard_error > 0:
        return None
    errors = [math.sqrt(_noise(one)) for one in known]
    noise = weighted_sum([(1.0, Estimate(0.0, sd, s * q)) for sd, (s, q) in zip(errors, free, strict=True)])
    ratio = (noise.standard_error / total.standard_error) ** 2
    freedom = (total.degrees, noise.degrees) if ratio > 0 else (1.0, 1.0)
    low, high = np.minimum(1.0, ratio * stats.f.ppf([0.025, 0.975], *freedom))
    return NoiseShare(min(1.0, ratio), Interval(float(low), float(high), 0.95))
