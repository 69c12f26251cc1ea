"""Hypervolume of a set of runs.

The geometry is computed by moocore, after a check of its input: a nan may make moocore drop finite runs, and
points outside the reference corner are ignored without a warning.
"""

import moocore
import numpy as np

from analysis.stats.pairs import FloatArray, Pairs

Reference = tuple[float, float]
"""(KL in nats, reward) of the corner from which hypervolume is measured."""


def hypervolume(kl: FloatArray, reward: FloatArray, reference: Reference) -> float:
    """Area dominated by a set of runs, on (log KL, reward), up to a reference corner.

    Args:
        kl: KL in nats, positive, shape [N]; without diverged runs.
        reward: Mean reward, shape [N].
        reference: Corner; runs outside it contribute nothing.

    Returns:
        Area in nats of log KL times reward units; 0 for no runs.

    Raises:
        ValueError: If a coordinate is not finite, or a KL is not positive.

    Example:
        >>> round(hypervolume(np.array([1.0]), np.array([2.0]), (np.e, 0.0)), 6)
        2.0
    """
    if not (np.isfinite(kl).all() and np.isfinite(reward).all() and (kl > 0).all()):
        raise ValueError(
            "hypervolume needs finite rewards and positive, finite KL: remove diverged runs first"
        )
    if not len(kl):
        return 0.0
    corner = [np.log(reference[0]), reference[1]]
    return float(moocore.hypervolume(np.column_stack([np.log(kl), reward]), corner, maximise=[False, True]))


def hypervolume_differences(pairs: Pairs, reference: Reference) -> FloatArray:
    """HV(treatment) - HV(control) of the runs of each replicate, without diverged ones; shape [S].

    A hypervolume is not a sum over pairs: a swap exchanges the labels of a whole replicate.

    Args:
        pairs: The matched pairs.
        reference: Corner fixed in advance. With a corner computed from all runs a test remains exact, but
            the difference cannot be compared with that of other sweeps.
    """
    volumes = np.zeros((pairs.replicates, 2))
    for place, replicate in enumerate(np.unique(pairs.replicate)):
        for side in (0, 1):
            rows = (pairs.replicate == replicate) & ~pairs.diverged[:, side]
            volumes[place, side] = hypervolume(pairs.kl[rows, side], pairs.reward[rows, side], reference)
    return np.asarray(volumes[:, 0] - volumes[:, 1])
