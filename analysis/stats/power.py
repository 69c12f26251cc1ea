"""Power: what a design detects, how often its test errs off the normal, and the noise of the evaluation."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, Interval, detectable, weighted_sum
from analysis.stats.pairs import FEWEST_BLOCKS, FloatArray
from analysis.stats.swaps import TIE, swap_signs, upper_p
from analysis.stats.text import whole_percent

# Number of simulated sweeps.
SWEEPS = 4_000
# The largest design that is looked at, in blocks, or in replicates of each.
_MOST = 1_000


@dataclass(frozen=True)
class NoiseShare:
    """The share of evaluation noise in the variance of a pair's difference."""

    value: float  # the share, at most 1
    interval: Interval  # its 95% interval

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
    known = [_errors(one) for one in differences if min(one.shape) > 1]
    noise, total = (weighted_sum([(1.0, pair[place]) for pair in known]) for place in (0, 1))
    if not total.standard_error > 0:
        return None
    ratio = (noise.standard_error / total.standard_error) ** 2
    freedom = (total.degrees, noise.degrees) if ratio > 0 else (1.0, 1.0)
    low, high = np.minimum(1.0, ratio * stats.f.ppf([0.025, 0.975], *freedom))
    return NoiseShare(min(1.0, ratio), Interval(float(low), float(high), 0.95))


def _errors(differences: FloatArray) -> tuple[Estimate, Estimate]:
    """Standard deviations of D_s, that from the evaluation and in total, with their degrees of freedom."""
    pairs, prompts = differences.shape
    means = differences.mean(axis=1)
    residuals = differences - means[:, None] - differences.mean(axis=0) + differences.mean()
    free = (pairs - 1) * (prompts - 1)
    noise = math.sqrt(float((residuals**2).sum()) / free / prompts)
    return Estimate(0.0, noise, free), Estimate(0.0, float(means.std(ddof=1)), pairs - 1)


@dataclass(frozen=True)
class Design:
    """A planned comparison of two arms, by S replicates at each of several betas, which may be in blocks."""

    betas: int  # number of KL weights
    replicates: int  # matched pairs at each
    blocks: int = 0  # number of blocks of the replicates, 0 without
    level: float = 0.05  # the two-sided level of the comparison

    @property
    def over_blocks(self) -> bool:
        """Whether blocks are the units."""
        return self.blocks >= FEWEST_BLOCKS

    @property
    def single(self) -> bool:
        """Whether each unit is one difference, as `Pairs.single`."""
        return self.betas == 1 and self.blocks in (0, self.replicates)

    @property
    def units(self) -> int:
        """Number of independent values: blocks, or pairs."""
        return self.blocks if self.over_blocks else self.betas * self.replicates

    @property
    def by_t(self) -> bool:
        """Whether the t test of the units decides, and not swaps."""
        return self.over_blocks or self.single

    def reach(self, pilot: float = math.inf) -> float | None:
        """The smallest difference that it detects, see `detectable`.

        Args:
            pilot: Degrees of freedom of the standard error; infinite if it is known.

        Example:
            >>> round(Design(1, 10).reach(), 3), Design(3, 1).reach()
            (3.149, None)
        """
        return detectable(self.units, self.level, 0.0 if self.by_t else 2.0 ** (1 - self.units), pilot)

    def grown(self, enough: Callable[["Design"], bool]) -> "Design | None":
        """The smallest design of this kind that is enough: with more replicates, or with more blocks.

        Blocks keep their number of replicates where they are the units. None if a thousand units do not do.
        """
        each = self.replicates // self.blocks if self.over_blocks else max(1, self.blocks)
        sizes = [
            replace(self, replicates=each * n, blocks=n if self.over_blocks else self.blocks)
            for n in range(FEWEST_BLOCKS if self.over_blocks else 1, _MOST + 1)
        ]
        place = bisect_left(sizes, True, key=enough)  # power increases with their size
        return sizes[place] if place < len(sizes) else None


def swap_p_values(sums: FloatArray, *, resamples: int = 999) -> FloatArray:
    """p-values of many swap tests with the same number of units, for simulations; see `swap_test`.

    Args:
        sums: Contributions of each unit, shape [sweeps, units].
        resamples: Number of random swaps; all swaps are enumerated if there are no more.
    """
    units = sums.shape[1]
    signs, exact = swap_signs(units, resamples)
    # Random swaps are independent between sweeps
    turned = sums if exact else sums * np.random.default_rng([0, 1]).choice((-1.0, 1.0), size=sums.shape)
    tolerance = np.abs(sums).max(axis=1, initial=0.0) * TIE
    observed, null = sums.sum(axis=1), signs @ turned.T
    upper, lower = (upper_p(s * observed, s * null, exact=exact, tolerance=tolerance) for s in (1.0, -1.0))
    return np.asarray(np.minimum(1.0, 2 * np.minimum(upper, lower)))


# Differences with mean 0, in simulations: name -> draws of a shape.
_COLLAPSES = 0.1
NULLS: dict[str, Callable[[np.random.Generator, tuple[int, int]], FloatArray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "log-normal": lambda rng, shape: np.exp(rng.normal(size=shape)) - np.exp(0.5),
    "collapses": lambda rng, shape: (
        0.8 + 0.5 * rng.normal(size=shape) - 0.8 / _COLLAPSES * (rng.random(shape) < _COLLAPSES)
    ),
}
"""The third is a gain that is lost by one unit in ten, which collapses."""


def rejections(units: int, level: float, *, by_t: bool) -> dict[str, tuple[float, float]]:
    """Shares of simulated sweeps without a mean difference in which a test says better, and worse.

    Args:
        units: Number of independent differences.
        level: Level of the test.
        by_t: Whether it is the t test of their mean, or that by swaps.

    Returns:
        Name of the distribution of a difference -> the two shares.
    """
    found = {}
    for name, draw in NULLS.items():
        values = draw(np.random.default_rng(units), (SWEEPS, units))
        p_values = stats.ttest_1samp(values, 0.0, axis=1).pvalue if by_t else swap_p_values(values)
        rejected, up = p_values <= level, values.sum(axis=1) > 0
        found[name] = float((rejected & up).mean()), float((rejected & ~up).mean())
    return found
