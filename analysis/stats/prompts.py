"""The error that an evaluation on few prompts adds to a difference over seeds."""

import math
from dataclasses import replace

import numpy as np

from analysis.stats.contrast import Contrast
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import Pairs


def over_prompts(estimate: Estimate, contrast: Contrast, pairs: Pairs) -> Estimate | None:
    """An estimate whose error is that of seeds and of prompts.

    The difference of pair s on prompt q is d_sq = mean + a_s + b_q + e_sq, of which the estimate's standard
    error has Var(a) and Var(e). All pairs are evaluated on the same Q prompts, so that the variance of the
    weighted mean of each prompt, divided by Q, has Var(b) and Var(e); that of e, from the residuals, is
    subtracted once. Degrees of freedom are Satterthwaite's.

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
    noise = 0.0  # the variance of the mean that the residuals e have
    for stratum in np.unique(pairs.stratum):
        rows = pairs.stratum == stratum
        own = values[rows]
        left = own - own.mean(axis=1, keepdims=True) - own.mean(axis=0) + own.mean()
        free = max(1, len(own) - 1) * (count - 1)
        noise += float((weights[rows] ** 2).sum() * (left**2).sum()) / free / count
    prompts = float((weights @ values).var(ddof=1)) / count
    if prompts <= noise or not estimate.degrees > 0:
        return estimate
    seeds = estimate.standard_error**2
    total = seeds + prompts - noise
    degrees = total**2 / (seeds**2 / estimate.degrees + prompts**2 / (count - 1))
    return replace(estimate, standard_error=math.sqrt(total), degrees=degrees)
