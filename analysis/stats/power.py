"""Size and power of the tests, from simulated sweeps."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.stats import frontier
from analysis.stats.contrast import mean_of
from analysis.stats.intervals import Estimate, detectable_effect
from analysis.stats.kl_reward import kl_contrast
from analysis.stats.matched_kl import matched_kl
from analysis.stats.objective import objective_contrast
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.scenario import Scenario
from analysis.stats.swaps import Alternative, p_values, swap_signs, unit_sums
from analysis.stats.text import fixed

SUMS: dict[str, Callable[[Pairs], FloatArray]] = {
    "objective": lambda pairs: objective_contrast(pairs).contributions,
    "kl": lambda pairs: -kl_contrast(pairs).contributions,
    "frontier_share": frontier.share_contributions,
    "replicate_share": frontier.replicate_share_contributions,
    "net_dominance": frontier.net_dominance_contributions,
    "matched_dominance": frontier.matched_dominance_contributions,
}
"""The tests whose statistic is a sum of swap contributions, positive in favour of the treatment, by key."""
MATCHED_KL = "matched_kl"

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


def rejection_rates(
    scenario: Scenario,
    tests: Iterable[str] = ("objective",),
    *,
    lift: float = 0.0,
    spread: float = 1.0,
    alpha: float = 0.05,
    alternative: Alternative = "two-sided",
    sweeps: int = SWEEPS,
    seed: int = 0,
) -> dict[str, Rate]:
    """The rate at which each test rejects at `alpha`, in sweeps drawn from a scenario.

    Args:
        scenario: The scenario.
        tests: Keys of `SUMS`, or "matched_kl", which here does not depend on the test of J. Where there is no
            estimate at matched KL it does not reject.
        lift: True advantage of the treatment in `scenario.sd`; at 0 (and spread 1) the rate is the size.
        spread: Factor on the control's noise.
        alpha: Level.
        alternative: "greater" asks for rejections in favour of the treatment.
        sweeps: Simulated sweeps.
        seed: Seed of everything.
    """
    # The smallest p that random swaps can give must be well below the level.
    resamples = max(999, math.ceil(20 / alpha))
    kl, reward = scenario.draw(np.random.default_rng(seed), sweeps, lift=lift, spread=spread)
    found = {}
    for key in tests:
        if key == MATCHED_KL:
            fits = [matched_kl(pairs).estimate for pairs in map(scenario.pairs_of, kl, reward)]
            p_values = np.array([_one_p(fit, alternative) for fit in fits])
        else:
            sums = _sums(scenario, key, kl, reward)
            p_values = swap_p_values(sums, alternative, resamples, seed)
        found[key] = Rate(float((p_values <= alpha).mean()), sweeps)
    return found


def _one_p(estimate: Estimate, alternative: Alternative) -> float:
    """The p-value of a t test; 1 without an estimate."""
    if not estimate.degrees > 0:
        return 1.0
    if alternative == "two-sided":
        return estimate.p_value
    favoured = (estimate.value > 0) == (alternative == "greater")
    return estimate.p_value / 2 if favoured else 1 - estimate.p_value / 2


def primary_rate(scenario: Scenario, *, lift: float, alpha: float, sweeps: int = SWEEPS) -> Rate:
    """The rate at which the test of the scenario's outcome rejects; arguments as for `rejection_rates`."""
    found = rejection_rates(scenario, [scenario.outcome], lift=lift, alpha=alpha, sweeps=sweeps)
    return found[scenario.outcome]


def _sums(scenario: Scenario, key: str, kl: FloatArray, reward: FloatArray) -> FloatArray:
    """Contributions of each unit to a test's statistic, shape [sweeps, units]."""
    unit = scenario.unit if scenario.seeds_shared else None
    if key in ("objective", "kl"):  # all sweeps at once
        values = -kl if key == "kl" else reward - np.array(scenario.betas)[scenario.beta_index, None] * kl
        differences = (values[..., 0] - values[..., 1]) / scenario.pairs
        if unit is None:
            return np.asarray(differences)
        return np.asarray(differences.reshape(len(kl), -1, scenario.replicates).sum(axis=1))
    drawn = map(scenario.pairs_of, kl, reward)
    return np.array([unit_sums(SUMS[key](pairs), unit) for pairs in drawn])


def swap_p_values(
    sums: FloatArray, alternative: Alternative = "two-sided", resamples: int = 999, seed: int = 0
) -> FloatArray:
    """p-values of many swap tests with the same number of units, for simulations; see `swap_test`.

    Args:
        sums: Contributions of each unit, shape [sweeps, units].
        alternative: The sums that are evidence against the null hypothesis.
        resamples: Number of random swaps; all swaps are enumerated if there are no more.
        seed: Seed of the random swaps.
    """
    units = sums.shape[1]
    signs, exact = swap_signs(units, resamples, seed)
    # Random swaps are independent between sweeps
    turned = sums if exact else sums * np.random.default_rng([seed, 1]).choice((-1.0, 1.0), size=sums.shape)
    tolerance = np.abs(sums).max(axis=1, initial=0.0) * 2.0**-32
    return p_values(sums.sum(axis=1), signs @ turned.T, alternative, exact=exact, tolerance=tolerance)


def replicates_needed(
    scenario: Scenario,
    lift: float,
    *,
    grid: Sequence[int] = REPLICATES,
    alpha: float = 0.05,
) -> int | None:
    """The smallest number of replicates in `grid` with which the primary test has 80% power.

    Args:
        scenario: The scenario; its number of replicates is not used.
        lift: True advantage of the treatment in `scenario.sd`.
        grid: Numbers of replicates, increasing; power is taken to increase along it.
        alpha: Level.

    Returns:
        The number; None if the largest is not enough.
    """

    def enough(replicates: int) -> bool:
        design = replace(scenario, replicates=replicates)
        return primary_rate(design, lift=lift, alpha=alpha, sweeps=_SWEEPS_OF_SEARCH).value >= POWER

    place = bisect_left(grid, True, key=enough)
    return grid[place] if place < len(grid) else None


def detectable_difference(pairs: Pairs, replicates: int, level: float) -> float | None:
    """The difference in J that a t test at `level` detects with 80 % power, estimated as in the report.

    Args:
        pairs: Pairs of a pilot, or of the sweep itself.
        replicates: Replicates of the planned sweep.
        level: The level of each comparison.
    """
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
        error = float(_sums(scenario, scenario.outcome, *drawn).sum(axis=1).std())
    else:
        pairs = pairs.subset(np.asarray(~pairs.diverged.any(axis=1)))
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
