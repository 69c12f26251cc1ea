"""Simulated sweeps: a curve of reward against KL, with noise on both."""

import math
from dataclasses import dataclass

import numpy as np

from analysis.stats.matched_kl import curve_design, matched_kl
from analysis.stats.pairs import FloatArray, IntArray, Pairs
from analysis.stats.swaps import unit_sums


@dataclass(frozen=True)
class Scenario:
    """A model of sweeps: a curve of reward against KL, with Gaussian noise on log KL and on the reward."""

    betas: tuple[float, ...]  # KL weights
    log_kl: tuple[float, ...]  # mean log KL at each beta
    replicates: int  # matched pairs at each beta
    # c0, c1, ... of reward = c0 + c1 sqrt(KL) + c2 KL + noise; shorter for a line or a constant
    curve: tuple[float, ...]
    log_kl_sd: float  # SD of log KL between replicates
    reward_sd: float  # SD of the reward around the curve between replicates
    correlation: float = 0.3  # correlation of the two runs of a pair
    cluster: float = 0.0  # SD of a replicate's effect on the difference at all betas, in `sd`
    # Whether replicates share seeds over beta, so that whole replicates are swapped
    seeds_shared: bool = False
    # What decides, and what true differences are differences in: "objective" for the reward at given KL, "kl"
    # for log KL
    outcome: str = "objective"

    @property
    def sd(self) -> float:
        """SD between replicates of what decides: of log KL, or of the reward at given KL."""
        return self.log_kl_sd if self.outcome == "kl" else self.reward_sd

    @property
    def pairs(self) -> int:
        """Number of matched pairs of a sweep, P."""
        return len(self.betas) * self.replicates

    @property
    def beta_index(self) -> IntArray:
        """Index of the KL weight of each pair, shape [P]."""
        return np.repeat(np.arange(len(self.betas)), self.replicates)

    @property
    def replicate(self) -> IntArray:
        """Replicate of each pair, shape [P]."""
        return np.tile(np.arange(self.replicates), len(self.betas))

    @property
    def unit(self) -> IntArray:
        """Swap unit of each pair, shape [P]."""
        return self.replicate if self.seeds_shared else np.arange(self.pairs)

    def draw(
        self, rng: np.random.Generator, sweeps: int, *, lift: float = 0.0, spread: float = 1.0
    ) -> tuple[FloatArray, FloatArray]:
        """KL and reward of all runs of many sweeps, shape [sweeps, P, 2] each.

        Args:
            rng: Generator of the noise.
            sweeps: Number of sweeps.
            lift: Advantage of the treatment, in `sd`: added to its reward, or subtracted from its log KL.
            spread: Factor on the control's noise.
        """
        shape = (2, sweeps, self.pairs)
        noise = math.sqrt(self.correlation) * rng.normal(size=(*shape, 1))
        noise = noise + math.sqrt(1 - self.correlation) * rng.normal(size=(*shape, 2))
        noise *= np.array([1.0, spread])
        shared = self.cluster * rng.normal(size=(sweeps, self.replicates))[:, self.replicate]
        log_kl = np.array(self.log_kl)[self.beta_index, None] + self.log_kl_sd * noise[0]
        if self.outcome == "kl":
            log_kl[..., 0] -= self.sd * (lift + shared)
        kl = np.exp(log_kl)
        reward = np.polynomial.polynomial.polyval(np.sqrt(kl), np.array(self.curve))
        reward = reward + self.reward_sd * noise[1]
        if self.outcome != "kl":
            reward[..., 0] += self.sd * (lift + shared)
        return kl, reward

    def pairs_of(self, kl: FloatArray, reward: FloatArray) -> Pairs:
        """The matched pairs of a drawn sweep, from its KL and reward, shape [P, 2] each."""
        beta = np.array(self.betas)[self.beta_index]
        where = (beta, self.beta_index, self.replicate, self.unit)
        return Pairs("treatment", "control", *where, kl, reward)


STANDARD = Scenario(
    betas=tuple(0.5 / math.sqrt(kl) for kl in (0.5, 1, 2, 4, 8, 16)),
    log_kl=tuple(math.log(kl) for kl in (0.5, 1, 2, 4, 8, 16)),
    replicates=10,
    curve=(0.0, 1.0),
    log_kl_sd=0.15,
    reward_sd=0.1,
)
"""For plans without a pilot: six betas, each optimal for reward = sqrt(KL), and pair correlation 0.3."""


def scenario_of(pairs: Pairs, outcome: str = "objective") -> Scenario | None:
    """The scenario estimated from the runs of a sweep; None with too few finite ones.

    Variances are computed within arm and beta, so that differences between arms do not count as noise.

    Args:
        pairs: The runs.
        outcome: As of `Scenario`; correlation and cluster are those of what decides. If that is the KL,
            rewards are not read.
    """
    pairs = pairs.subset(np.asarray(~pairs.diverged.any(axis=1) & (pairs.kl > 0).all(axis=1)))
    sizes = [int((pairs.beta_index == index).sum()) for index in pairs.beta_indices]
    if not sizes or min(sizes) < 2:
        return None
    free = len(pairs) - len(sizes)
    log_kl = np.log(pairs.kl)
    means = [float(log_kl[pairs.beta_index == index].mean()) for index in pairs.beta_indices]
    curve, residuals = np.zeros(1), np.zeros_like(log_kl)
    if outcome != "kl":
        curve = matched_kl(pairs).curve
        residuals = pairs.reward - (curve_design(pairs.kl.ravel()) @ curve).reshape(-1, 2)
    for values in (log_kl, residuals):
        for index in pairs.beta_indices:
            values[pairs.beta_index == index] -= values[pairs.beta_index == index].mean(axis=0)
    deciding = log_kl if outcome == "kl" else residuals
    products = deciding.T @ deciding / free
    variance = float(np.trace(products)) / 2
    cluster = 0.0
    if pairs.seeds_shared and variance > 0:
        sums = unit_sums(deciding[:, 0] - deciding[:, 1], pairs.unit) / len(sizes)
        excess = sums.var(ddof=1) - 2 * (variance - products[0, 1]) / len(sizes)
        cluster = math.sqrt(max(0.0, float(excess)) / variance)
    return Scenario(
        betas=tuple(float(pairs.beta[pairs.beta_index == index][0]) for index in pairs.beta_indices),
        log_kl=tuple(means),
        replicates=max(sizes),
        curve=tuple(map(float, curve)),
        log_kl_sd=math.sqrt(float((log_kl**2).sum()) / (2 * free)),
        reward_sd=math.sqrt(float((residuals**2).sum()) / (2 * free)),
        correlation=min(0.95, max(0.0, float(products[0, 1]) / variance)) if variance > 0 else 0.0,
        cluster=cluster,
        seeds_shared=pairs.seeds_shared,
        outcome=outcome,
    )
