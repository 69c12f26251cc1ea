"""Matched pairs drawn from a stated generator, for tests and certificates."""

from dataclasses import replace

import numpy as np

from analysis.stats import Pairs


def draw_pairs(
    rng: np.random.Generator,
    *,
    replicates: int = 5,
    betas=(0.05, 0.1, 0.2),
    lift: float = 0.0,
    spread: float = 1.0,
    correlation: float = 0.3,
    cluster: float = 0.0,
    seeds_shared: bool = False,
) -> Pairs:
    """Runs on reward = sqrt(KL) with noise of SD 0.1 (reward) and 0.15 (log KL).

    `lift`: added to the treatment's reward, in SDs; `spread`: factor on the control's noise;
    `correlation`: of the two runs of a pair; `cluster`: SD, in run SDs, of a replicate's effect on the
    difference, shared by its betas.
    """
    count = len(betas)
    beta_index = np.repeat(np.arange(count), replicates)
    replicate = np.tile(np.arange(replicates), count)
    beta = np.asarray(betas)[beta_index]
    size = (2, count * replicates)

    def noise():
        common, own = rng.normal(size=(*size, 1)), rng.normal(size=(*size, 2))
        return np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own

    reward_noise, kl_noise = noise() * np.array([1.0, spread])
    reward_noise = (
        reward_noise + np.array([0.5, -0.5]) * cluster * rng.normal(size=replicates)[replicate, None]
    )
    kl = 0.3 / beta[:, None] * np.exp(0.15 * kl_noise)
    reward = np.sqrt(kl) + 0.1 * reward_noise
    reward[:, 0] += 0.1 * lift
    unit = replicate if seeds_shared else np.arange(len(beta))
    return Pairs("RaoBlackwell", "MonteCarlo", beta, beta_index, replicate, unit, kl, reward)


def pairs_of(kl, reward, *, beta_index=None, replicate=None, unit=None, **more) -> Pairs:
    """Pairs from plain lists; by default one beta and a replicate each."""
    kl, reward = np.array(kl, dtype=float), np.array(reward, dtype=float)
    size = len(kl)
    beta_index = np.zeros(size, int) if beta_index is None else np.array(beta_index)
    replicate = np.arange(size) if replicate is None else np.array(replicate)
    unit = np.arange(size) if unit is None else np.array(unit)
    beta = 0.1 * (1 + beta_index.astype(float))
    return Pairs("A", "B", beta, beta_index, replicate, unit, kl, reward, **more)


def swapped(pairs: Pairs, mask: np.ndarray) -> Pairs:
    """The pairs with the two labels exchanged where `mask` [P] is true."""
    columns = {"kl": pairs.kl, "reward": pairs.reward}
    return replace(
        pairs, **{name: np.where(mask[:, None], both[:, ::-1], both) for name, both in columns.items()}
    )
