"""Generator of the simulations in the certificates: gradients with a known truth."""

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
