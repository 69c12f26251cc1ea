"""Gradient variance from Gram matrices: tr Cov of two estimators on the same batches.

All statistics are functions of the 2B x 2B Gram matrix of the batch gradients. What differs between batches
(prompts and completions, or completions only), the batch size, and the term whose gradient it is (KL, reward
or both) are part of the claim, which the caller states.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, log_ratio
from analysis.stats.inversion import ratio_swap_test
from analysis.stats.pairs import FloatArray
from analysis.stats.swaps import SwapTest, swap_test

HEAVY_SHARE = 0.2
"""If one batch has more than this share of a trace, the comparison is inconclusive."""


@dataclass(frozen=True)
class GradientVariance:
    """Comparison of tr Cov(g) between treatment and control.

    Attributes:
        log_ratio: Log of the ratio treatment / control, with a jackknife standard error over batches.
        test: Sign flips of the differences of squared distances to each estimator's mean.
        exact_test: Sign flips on disjoint pairs of batches, with an interval of the log ratio: exact for any
            number of batches, less powerful.
        kurtosis: Kurtosis of the squared distances of treatment and control (3 for a Gaussian).
        top_share: Largest share of one batch in the trace of treatment and control.
        batches: Number of batches, B.
    """

    log_ratio: Estimate
    test: SwapTest
    exact_test: SwapTest
    kurtosis: tuple[float, float]
    top_share: tuple[float, float]
    batches: int

    @property
    def heavy_tailed(self) -> bool:
        """Whether one batch dominates a trace, so that nothing should be concluded."""
        return max(self.top_share) > HEAVY_SHARE


def compare_gradient_variance(gram: FloatArray) -> GradientVariance:
    """Test tr Cov(g_treatment) = tr Cov(g_control) on the same B batches.

    With d_b = ||g_b - mean||^2 and z_b = d_b(control) - d_b(treatment), mean z = 0 is the vector form of
    Pitman and Morgan's tr Cov(g_1 + g_2, g_1 - g_2) = 0. Sign flips of z are exact if the centred pair is
    exchangeable, which centring on the same batches violates slightly; the test on disjoint pairs is exact.

    Args:
        gram: Inner products in float64, shape [2B, 2B]: the treatment's B batch gradients first, then the
            control's on the same batches in the same order.

    Raises:
        ValueError: If the matrix is not finite, or not of shape [2B, 2B] with B >= 4.
    """
    side = len(gram)
    if gram.shape != (side, side) or side % 2 or side < 8 or not np.isfinite(gram).all():
        raise ValueError(f"gram must be finite with shape [2B, 2B] and B >= 4, got {gram.shape}")
    distances = squared_distances(gram)
    traces = distances.sum(axis=1)
    return GradientVariance(
        # Without batch b, a trace is S - d_b B / (B - 1)
        log_ratio(traces, traces[:, None] - distances * side / (side - 2)),
        swap_test(distances[1] - distances[0]),
        ratio_swap_test(*disjoint_halves(gram))[1],
        tuple(float(k) for k in stats.kurtosis(distances, axis=1, fisher=False)),  # type: ignore[arg-type]
        tuple(float(share) for share in distances.max(axis=1) / np.maximum(traces, np.finfo(float).tiny)),  # type: ignore[arg-type]
        side // 2,
    )


def squared_distances(gram: FloatArray) -> FloatArray:
    """||g_b - mean||^2 of each batch under each estimator, shape [2, B]."""
    batches = len(gram) // 2
    parts = (gram[:batches, :batches], gram[batches:, batches:])
    return np.stack([np.diag(part) - 2 * part.mean(axis=1) + part.mean() for part in parts])


def disjoint_halves(gram: FloatArray) -> FloatArray:
    """v_j = ||g_2j-1 - g_2j||^2 / 2 of treatment and control over disjoint pairs, shape [2, B / 2]."""
    batches = len(gram) // 2
    first = np.arange(0, batches - 1, 2)

    def halves(offset: int) -> FloatArray:
        one, two = offset + first, offset + first + 1
        return np.asarray(gram[one, one] + gram[two, two] - 2 * gram[one, two]) / 2

    return np.stack([halves(0), halves(batches)])
