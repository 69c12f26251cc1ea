"""Planning: size and power of the tests from simulated sweeps, and the noise of the evaluation in a sweep."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.stats.contrast import kl_contrast, mean_of, objective_contrast
from analysis.stats.intervals import Estimate, Interval, detectable_effect, weighted_sum
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.scenario import Scenario
from analysis.stats.swaps import TIE, swap_signs, upper_p
from analysis.stats.text import fixed, whole_percent


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


# Number of simulated sweeps. The plan and the report use the same number, so that their power agrees.
SWEEPS = 1_000
_SWEEPS_OF_SEARCH = 400
# The power that a design should have.
POWER = 0.8
# Numbers of replicates among which the smallest with enough power is looked for.
REPLICATES = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 56, 80, 112)


@dataclass(frozen=True)
class Rate:
    """The fraction of simulated sweeps in which a test rejects."""

    value: float
    sweeps: int

    @property
    def error(self) -> float:
        """Monte-Carlo standard error."""
        return math.sqrt(self.value * (1 - self.value) / self.sweeps)

    def __str__(self) -> str:
        """The rate with its Monte-Carlo error.

        Example:
            >>> str(Rate(0.048, 1000))
            '0.048 ± 0.007'
        """
        return f"{fixed(self.value, 3)} ± {fixed(self.error, 3)}"


def primary_rate(scenario: Scenario, *, lift: float, alpha: float = 0.05, sweeps: int = SWEEPS) -> Rate:
    """The rate at which the two-sided test of the scenario's outcome rejects, in sweeps drawn from it.

    Args:
        scenario: The scenario.
        lift: True advantage of the treatment in `scenario.sd`; at 0 the rate is the size.
        alpha: Level.
        sweeps: Simulated sweeps.
    """
    sums = _sums(scenario, *scenario.draw(np.random.default_rng(0), sweeps, lift=lift))
    # The smallest p that random swaps can give must be well below the level
    p_values = swap_p_values(sums, resamples=max(999, math.ceil(20 / alpha)))
    return Rate(float((p_values <= alpha).mean()), sweeps)


def _sums(scenario: Scenario, kl: FloatArray, reward: FloatArray) -> FloatArray:
    """Contributions of each unit to the test of what decides, shape [sweeps, units]."""
    betas = np.array(scenario.betas)[scenario.beta_index, None]
    values = -kl if scenario.outcome == "kl" else reward - betas * kl
    differences = np.asarray((values[..., 0] - values[..., 1]) / scenario.pairs)
    if scenario.seeds_shared:
        return np.asarray(differences.reshape(len(kl), -1, scenario.replicates).sum(axis=1))
    return differences


def swap_p_values(
    sums: FloatArray, *, two_sided: bool = True, resamples: int = 999, seed: int = 0
) -> FloatArray:
    """p-values of many swap tests with the same number of units, for simulations; see `swap_test`.

    Args:
        sums: Contributions of each unit, shape [sweeps, units].
        two_sided: Whether small sums are evidence against the null hypothesis, too.
        resamples: Number of random swaps; all swaps are enumerated if there are no more.
        seed: Seed of the random swaps.
    """
    units = sums.shape[1]
    signs, exact = swap_signs(units, resamples, seed)
    # Random swaps are independent between sweeps
    turned = sums if exact else sums * np.random.default_rng([seed, 1]).choice((-1.0, 1.0), size=sums.shape)
    tolerance = np.abs(sums).max(axis=1, initial=0.0) * TIE
    observed, null = sums.sum(axis=1), signs @ turned.T
    upper, lower = (upper_p(s * observed, s * null, exact=exact, tolerance=tolerance) for s in (1.0, -1.0))
    return np.minimum(1.0, 2 * np.minimum(upper, lower)) if two_sided else upper


def replicates_needed(scenario: Scenario, lift: float, *, alpha: float = 0.05) -> int | None:
    """The smallest number of `REPLICATES` with which the primary test has 80% power.

    Args:
        scenario: The scenario; its number of replicates is not used.
        lift: True advantage of the treatment in `scenario.sd`.
        alpha: Level.

    Returns:
        The number; None if the largest is not enough.
    """

    def enough(replicates: int) -> bool:
        design = replace(scenario, replicates=replicates)
        return primary_rate(design, lift=lift, alpha=alpha, sweeps=_SWEEPS_OF_SEARCH).value >= POWER

    place = bisect_left(REPLICATES, True, key=enough)  # power increases with their number
    return REPLICATES[place] if place < len(REPLICATES) else None


def detectable_difference(pairs: Pairs, replicates: int, level: float) -> float | None:
    """The difference in J that a t test at `level` detects with 80 % power, estimated as in the report.

    Args:
        pairs: Pairs of a pilot, or of the sweep itself. Those with a diverged run have no difference in J.
        replicates: Replicates of the planned sweep.
        level: The level of each comparison.

    Returns:
        The difference; None if too few pairs are left, or none of a beta.
    """
    betas, pairs = len(pairs.beta_indices), pairs.finite
    if len(pairs.beta_indices) < betas:
        return None
    estimate = mean_of(objective_contrast(pairs), pairs)
    if not estimate.degrees > 0:
        return None
    factor = (replicates - 1) / (pairs.replicates - 1)
    error = estimate.standard_error * math.sqrt(pairs.replicates / replicates)
    return Estimate(0.0, error, estimate.degrees * factor).detectable(level)


def expected_detectable(scenario: Scenario, level: float) -> float:
    """The same for a scenario, with the root mean square of the standard errors of 200 simulated sweeps."""
    kl, reward = scenario.draw(np.random.default_rng(0), 200)
    found = [mean_of(objective_contrast(pairs), pairs) for pairs in map(scenario.pairs_of, kl, reward)]
    degrees = float(np.median([estimate.degrees for estimate in found]))
    squares = float(np.mean([estimate.standard_error**2 for estimate in found]))
    return math.sqrt(squares) * detectable_effect(degrees, level, POWER, pilot=math.inf)


def detectable_over_blocks(
    scenario: Scenario, blocks: int, level: float, pairs: Pairs | None = None
) -> dict[float, float]:
    """The differences in what decides that a t test over blocks detects with 80 % power.

    A standard error from a pilot is an estimate, over whose error the power is a mean. The variance of a
    block's mean is that between blocks plus that of the mean of the block's own pairs: a pilot without
    blocks shows only the second.

    Args:
        scenario: The pairs of the planned sweep, within blocks.
        blocks: Number of blocks, with equally many replicates.
        level: The level of each comparison.
        pairs: Pairs of a pilot. The spread of their differences is then used instead of the simulated one,
            which is far too large where a larger KL is paid for by the reward of the same run.

    Returns:
        SD of the difference between blocks -> difference, both in reward units, or in nats if the KL
        decides: with a pilot over blocks the SD of its blocks' means, otherwise 0 to 2 SDs of a pair's
        difference.
    """
    degrees = math.inf
    if pairs is None:
        drawn = scenario.draw(np.random.default_rng(0), SWEEPS)
        error = float(_sums(scenario, *drawn).sum(axis=1).std())
    else:
        pairs = pairs.finite
        contrast = (kl_contrast if scenario.outcome == "kl" else objective_contrast)(pairs)
        found = mean_of(contrast, pairs)
        degrees = found.degrees
        if pairs.over_blocks:
            spread = found.standard_error * math.sqrt(degrees + 1)
            effect = detectable_effect(blocks - 1, level, POWER, pilot=degrees)
            return {spread: effect * spread / math.sqrt(blocks)}
        error = found.standard_error * math.sqrt(pairs.replicates / scenario.replicates)
    spreads = [count * error * math.sqrt(scenario.pairs) for count in range(3)]
    reach = detectable_effect(blocks - 1, level, POWER, pilot=degrees)
    return {spread: reach * math.sqrt(error**2 + spread**2 / blocks) for spread in spreads}


def detectable_ratio(scenario: Scenario, level: float) -> float | None:
    """The largest ratio of KLs below 1 that the test of the KL detects with 80% power, by bisection.

    Its inverse is detected as often: exchanging the labels changes neither the noise nor the test.

    Args:
        scenario: A scenario in which the KL decides.
        level: The level of each comparison.

    Returns:
        The ratio, treatment over control, to a hundredth of `log_kl_sd`; None if no ratio is detected, as
        with too few replicates, or if the KL does not vary.
    """

    def enough(lift: float) -> bool:
        # The rate is a ratio of counts, which can be this power exactly
        return primary_rate(scenario, lift=lift, alpha=level).value >= POWER - 1e-9

    low, high = 0.0, 20.0  # in SDs of log KL
    if not scenario.log_kl_sd > 0 or not enough(high):
        return None
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return math.exp(-high * scenario.log_kl_sd)
