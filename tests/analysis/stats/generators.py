"""Generators of the simulations in the certificates: gradients and training curves with a known truth."""

import numpy as np


def draw_gradients(
    rng: np.random.Generator, batches: int, kind: str, *, ratio: float = 1.0, dimension: int = 64
) -> np.ndarray:
    """Gram matrix [2B, 2B] of batch gradients with a power-law spectrum (variances 1/i) and a common mean.

    "heavy": scale mixture with a lognormal(0.8) scale shared by the pair; the treatment has `ratio` times the
    control's trace, the control being the treatment plus independent noise (at 1: exchangeable with
    correlation 0.5). "spectrum": equal traces, the treatment's spectrum flat. "tails": equal traces, the
    treatment lognormal, the control Gaussian.
    """
    scales = np.sqrt(1 / np.arange(1, dimension + 1))
    first, second, common = rng.normal(size=(3, batches, dimension))
    heavy = np.exp(0.8 * rng.normal(size=(batches, 1)))
    if kind == "heavy" and ratio < 1:
        treatment = np.sqrt(ratio) * first * scales * heavy
        control = treatment + np.sqrt(1 - ratio) * second * scales * heavy
    elif kind == "heavy":
        treatment, control = ((common + own) / np.sqrt(2) * scales * heavy for own in (first, second))
    elif kind == "spectrum":
        treatment, control = first * np.sqrt((scales**2).mean()), second * scales
    else:
        treatment, control = first * scales * heavy / np.sqrt(np.exp(2 * 0.64)), second * scales
    stacked = np.concatenate([treatment, control]) + 1.0
    return stacked @ stacked.T


def draw_curves(
    rng: np.random.Generator,
    replicates: int,
    *,
    noise: str = "gaussian",
    ratio: float = 1.0,
    part: float = 1.0,
    steps: int = 50,
    correlation: float = 0.3,
) -> np.ndarray:
    """Curves [S, 2, T]: AR(0.95) around different mean curves; pair correlation 0.3.

    `ratio` is the control's variance over the treatment's in the last `part` of the steps; noise is
    "gaussian", "t5" (innovations), or "scale" (a lognormal(0.6) scale of each run, for all its steps).
    """
    shape = (replicates, 3, steps)
    innovations = rng.standard_t(5, size=shape) if noise == "t5" else rng.normal(size=shape)
    paths = np.empty(shape)
    paths[..., 0] = innovations[..., 0] / np.sqrt(1 - 0.95**2)
    for t in range(1, steps):
        paths[..., t] = 0.95 * paths[..., t - 1] + innovations[..., t]
    pair = np.sqrt(correlation) * paths[:, :1] + np.sqrt(1 - correlation) * paths[:, 1:]
    if noise == "scale":
        pair = pair * np.exp(0.6 * rng.normal(size=(replicates, 2, 1)))
    pair[:, 1, steps - round(part * steps) :] *= np.sqrt(ratio)
    time = np.linspace(0, 1, steps)
    return pair + 5 * np.stack([1 - np.exp(-4 * time), 1 - np.exp(-2 * time)])
