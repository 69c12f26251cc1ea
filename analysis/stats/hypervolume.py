"""Hypervolume of a set of runs.

The geometry is computed by moocore, after a check of its input: a nan may make moocore drop finite runs, and
points outside the reference corner are ignored without a warning.
"""

from dataclasses import dataclass

import moocore
import numpy as np

from analysis.stats.pairs import FloatArray, IntArray, Pairs
from analysis.stats.swaps import RESAMPLES, SwapTest, sign_flip_test, swap_test

Reference = tuple[float, float]
"""(KL in nats, reward) of the corner from which hypervolume is measured."""

# With more betas a replicate has too many label patterns to tabulate; whole replicates are swapped then.
_MAX_LEVELS = 10


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


@dataclass(frozen=True, eq=False)
class HypervolumeTest:
    """Comparison of the hypervolumes of two estimators per replicate.

    Attributes:
        differences: HV(treatment) - HV(control) of each replicate, shape [S].
        test: The swap test of their sum.
    """

    differences: FloatArray
    test: SwapTest


def hypervolume_test(pairs: Pairs, reference: Reference, *, resamples: int = RESAMPLES) -> HypervolumeTest:
    """Compare the hypervolumes of the two estimators' runs in each replicate.

    A hypervolume is not a sum over pairs. The difference is therefore tabulated for every labelling of a
    replicate's pairs, and read from the table for each swap. Blocked designs swap whole replicates.

    Args:
        pairs: The matched pairs.
        reference: Corner fixed in advance. With a corner computed from all runs the test remains exact, but
            the difference cannot be compared with that of other sweeps.
        resamples: Number of random swaps if enumeration would need more.
    """
    rows = [np.flatnonzero(pairs.replicate == replicate) for replicate in np.unique(pairs.replicate)]
    whole = pairs.seeds_shared or max(map(len, rows), default=0) > _MAX_LEVELS
    tables = []
    for members in rows:
        last = 2 ** len(members) - 1
        codes = np.array([0, last]) if whole else np.arange(last + 1)
        tables.append(_labelled_differences(pairs, members, reference, codes))
    differences = np.array([table[0] for table in tables])
    if whole:
        return HypervolumeTest(differences, swap_test(differences, resamples=resamples))

    def total(signs: FloatArray) -> FloatArray:
        swapped = (signs < 0).astype(np.int64)
        codes = [swapped[..., members] @ (1 << np.arange(len(members))) for members in rows]
        return np.asarray(sum(table[code] for table, code in zip(tables, codes, strict=True)))

    scale = max((float(np.abs(table).max()) for table in tables), default=0.0)
    return HypervolumeTest(differences, sign_flip_test(len(pairs), total, scale=scale, resamples=resamples))


def _labelled_differences(
    pairs: Pairs, members: IntArray, reference: Reference, codes: IntArray
) -> FloatArray:
    """HV difference of one replicate where bit i of a code swaps its pair i; shape [codes].

    Code i from the start is the complement of code i from the end: it assigns to one estimator the runs that
    its complement assigns to the other.
    """
    kl, reward = pairs.kl[members], pairs.reward[members]
    kept = np.isfinite(kl) & np.isfinite(reward)  # diverged runs contribute nothing
    volumes = []
    for column in (codes[:, None] >> np.arange(len(members))) & 1:
        runs = np.arange(len(members)), column
        finite = kept[runs]
        volumes.append(hypervolume(kl[runs][finite], reward[runs][finite], reference))
    return np.asarray(np.subtract(volumes, volumes[::-1]))
