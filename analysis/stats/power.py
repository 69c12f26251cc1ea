"""Size and power of the planned tests, by simulating sweeps like the one at hand."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.stats import frontier
from analysis.stats.matched_kl import matched_kl_contrast, matched_kl_residuals, reward_curve
from analysis.stats.objective import objective_contrast
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.swaps import Alternative, unit_sums

CONTRIBUTIONS: dict[str, Callable[[Pairs], FloatArray]] = {
    "T1": frontier.share_contributions,
    "T2": frontier.replicate_share_contributions,
    "T3": frontier.net_dominance_contributions,
    "objective": lambda pairs: objective_contrast(pairs).contributions,
    "matched_kl": lambda pairs: matched_kl_contrast(pairs).contributions,
    "T6": frontier.matched_dominance_contributions,
}
"""The tests that are sums of swap contributions, by their key."""


@dataclass(frozen=True)
class Scenario:
    """A sweep to simulate: one curve of reward against KL, with Gaussian noise on log KL and on the reward.

    Attributes:
        betas: KL weights.
        log_kl: Mean log KL at each.
        replicates: Matched runs at each.
        curve: c0, c1, .. of reward = c0 + c1 sqrt(KL) + c2 KL + noise; shorter for a line or a constant.
        log_kl_sd: SD of log KL between replicates.
        reward_sd: SD of the reward around the curve between replicates.
        correlation: Correlation of the two runs of a pair.
        cluster: SD of a replicate's effect on the difference at all its betas, in `reward_sd`.
        blocked: Whether replicates share seeds over beta, so that whole replicates are swapped.
    """

    betas: tuple[float, ...]
    log_kl: tuple[float, ...]
    replicates: int
    curve: tuple[float, ...]
    log_kl_sd: float
    reward_sd: float
    correlation: float = 0.3
    cluster: float = 0.0
    blocked: bool = False

    def simulate(self, rng: np.random.Generator, *, lift: float = 0.0, spread: float = 1.0) -> Pairs:
        """Draw a sweep.

        Args:
            rng: Source of the noise.
            lift: Added to the treatment's reward, in `reward_sd`.
            spread: Factor on the control's noise.
        """
        betas = len(self.betas)
        beta_index, replicate = np.divmod(np.arange(betas * self.replicates), self.replicates)
        common = rng.normal(size=(2, len(beta_index), 1))
        noise = math.sqrt(self.correlation) * common
        noise = noise + math.sqrt(1 - self.correlation) * rng.normal(size=(2, len(beta_index), 2))
        noise *= np.array([1.0, spread])
        shared = self.cluster * rng.normal(size=self.replicates)[replicate]
        kl = np.exp(np.array(self.log_kl)[beta_index, None] + self.log_kl_sd * noise[0])
        reward = np.polynomial.polynomial.polyval(np.sqrt(kl), np.array(self.curve))
        reward = reward + self.reward_sd * noise[1]
        reward[:, 0] += self.reward_sd * (lift + shared)
        unit = replicate if self.blocked else np.arange(len(beta_index))
        beta = np.array(self.betas)[beta_index]
        return Pairs("treatment", "control", beta, beta_index, replicate, unit, kl, reward)


STANDARD = Scenario(
    betas=tuple(0.5 / math.sqrt(kl) for kl in (0.5, 1, 2, 4, 8, 16)),
    log_kl=tuple(math.log(kl) for kl in (0.5, 1, 2, 4, 8, 16)),
    replicates=10,
    curve=(0.0, 1.0),
    log_kl_sd=0.15,
    reward_sd=0.1,
)
"""Six betas at their own optimum of reward = sqrt(KL); pair correlation .3: for plans without a pilot."""


def scenario_of(pairs: Pairs) -> Scenario | None:
    """The scenario a sweep's own runs suggest, or None with too few finite ones.

    Spreads are taken within estimator and beta, so that a difference between the estimators does not count
    as noise.
    """
    pairs = pairs.subset(np.asarray(~pairs.diverged.any(axis=1) & (pairs.kl > 0).all(axis=1)))
    sizes = [int((pairs.beta_index == index).sum()) for index in pairs.beta_indices]
    if not sizes or min(sizes) < 2:
        return None
    free = len(pairs) - len(sizes)
    log_kl, residuals = np.log(pairs.kl), matched_kl_residuals(pairs)
    means = [float(log_kl[pairs.beta_index == index].mean()) for index in pairs.beta_indices]
    for values in (log_kl, residuals):
        for index in pairs.beta_indices:
            values[pairs.beta_index == index] -= values[pairs.beta_index == index].mean(axis=0)
    products = residuals.T @ residuals / free
    variance = float(np.trace(products)) / 2
    cluster = 0.0
    if pairs.blocked and variance > 0:
        sums = unit_sums(residuals[:, 0] - residuals[:, 1], pairs.unit) / len(sizes)
        excess = sums.var(ddof=1) - 2 * (variance - products[0, 1]) / len(sizes)
        cluster = math.sqrt(max(0.0, float(excess)) / variance)
    return Scenario(
        betas=tuple(float(pairs.beta[pairs.beta_index == index][0]) for index in pairs.beta_indices),
        log_kl=tuple(means),
        replicates=max(sizes),
        curve=tuple(float(c) for c in reward_curve(pairs.kl, pairs.reward)),
        log_kl_sd=math.sqrt(float((log_kl**2).sum()) / (2 * free)),
        reward_sd=math.sqrt(variance),
        correlation=min(0.95, max(0.0, float(products[0, 1]) / variance)) if variance > 0 else 0.0,
        cluster=cluster,
        blocked=pairs.blocked,
    )


@dataclass(frozen=True)
class Rate:
    """A share of simulated sweeps."""

    value: float
    sweeps: int

    @property
    def error(self) -> float:
        """Monte-Carlo standard error."""
        return math.sqrt(self.value * (1 - self.value) / self.sweeps)


def rejection_rates(
    scenario: Scenario,
    tests: Iterable[str] = ("objective", "matched_kl"),
    *,
    lift: float = 0.0,
    spread: float = 1.0,
    alpha: float = 0.05,
    alternative: Alternative = "two-sided",
    sweeps: int = 1_000,
    seed: int = 0,
) -> dict[str, Rate]:
    """How often each test rejects, uncorrected, in sweeps drawn from a scenario.

    Args:
        scenario: What to draw from.
        tests: Keys of `CONTRIBUTIONS`.
        lift: True advantage of the treatment in `reward_sd`; at 0 (and spread 1) the rate is the size.
        spread: Factor on the control's noise.
        alpha: Level.
        alternative: "greater" asks for rejections in favour of the treatment.
        sweeps: Simulated sweeps.
        seed: Seed of everything.
    """
    # The smallest p that random swaps can give must be well below the level.
    resamples = max(999, math.ceil(20 / alpha))
    rng = np.random.default_rng(seed)
    drawn: dict[str, list[FloatArray]] = {key: [] for key in tests}
    for _ in range(sweeps):
        pairs = scenario.simulate(rng, lift=lift, spread=spread)
        for key, rows in drawn.items():
            rows.append(unit_sums(CONTRIBUTIONS[key](pairs), pairs.unit if pairs.blocked else None))
    return {
        key: Rate(
            float((swap_p_values(np.array(rows), alternative, resamples, seed) <= alpha).mean()), sweeps
        )
        for key, rows in drawn.items()
    }


def swap_p_values(
    sums: FloatArray, alternative: Alternative = "two-sided", resamples: int = 999, seed: int = 0
) -> FloatArray:
    """p-values of many swap tests of the same size at once: `swap_test` for simulations.

    Args:
        sums: Contributions of each unit, shape [sweeps, units].
        alternative: Which sums speak against the null.
        resamples: Random swaps; all of them are taken where there are no more.
        seed: Seed of the random swaps.
    """
    units = sums.shape[1]
    if 2.0**units <= resamples:
        signs = 1.0 - 2.0 * ((np.arange(2**units)[:, None] >> np.arange(units)) & 1)
        turned, extra = sums, 0
    else:
        rng = np.random.default_rng(seed)
        signs = rng.choice((-1.0, 1.0), size=(resamples, units))
        turned = sums * rng.choice((-1.0, 1.0), size=sums.shape)  # each sweep meets other swaps than the next
        extra = 1
    observed, null = sums.sum(axis=1), signs @ turned.T
    tolerance = np.abs(sums).max(axis=1, initial=0.0) * 2.0**-32
    upper = ((null >= observed - tolerance).sum(axis=0) + extra) / (len(signs) + extra)
    lower = ((null <= observed + tolerance).sum(axis=0) + extra) / (len(signs) + extra)
    if alternative == "two-sided":
        return np.asarray(np.minimum(1.0, 2 * np.minimum(upper, lower)))
    return np.asarray(upper if alternative == "greater" else lower)


def replicates_needed(
    scenario: Scenario,
    test: str,
    lift: float,
    *,
    power: float = 0.8,
    grid: Sequence[int] = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 56),
    alpha: float = 0.05,
    alternative: Alternative = "two-sided",
    sweeps: int = 400,
) -> int | None:
    """The smallest number of replicates in `grid` that finds `lift` with probability `power`, or None."""
    for replicates in grid:
        design = replace(scenario, replicates=replicates)
        found = rejection_rates(
            design, (test,), lift=lift, alpha=alpha, alternative=alternative, sweeps=sweeps
        )
        if found[test].value >= power:
            return replicates
    return None
