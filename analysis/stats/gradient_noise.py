"""Variance of the gradients of KL, reward and objective under several estimators, from Gram matrices.

Two estimators are compared on the same batches, by the 2B x 2B inner products of their gradients. What
differs between batches (prompts and completions, or completions only), the batch size, and the term whose
gradient it is (KL, reward or both) are part of the claim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from analysis.stats.claims import Claim
from analysis.stats.comparison import corrected
from analysis.stats.contrast import LOG_RATIO
from analysis.stats.intervals import Estimate, log_ratio
from analysis.stats.pairs import FloatArray
from analysis.stats.swaps import SwapTest, ratio_swap_test
from analysis.stats.verdict import Verdict

HEAVY_SHARE = 0.2
"""If one batch has more than this share of a trace, the comparison is inconclusive."""


@dataclass(frozen=True)
class GradientVariance:
    """Comparison of tr Cov(g) between treatment and control."""

    log_ratio: Estimate  # log of the ratio treatment / control, with a jackknife standard error over batches
    test: SwapTest  # sign flips on disjoint pairs of batches, with an interval of the log ratio
    top_share: tuple[float, float]  # largest share of one batch in the trace of treatment and control
    batches: int  # number of batches, B


def compare_gradient_variance(gram: FloatArray) -> GradientVariance:
    """Test tr Cov(g_treatment) = tr Cov(g_control) on the same B batches.

    Sign flips of disjoint pairs of batches are exact for any number of them; those of distances to each
    estimator's mean are more powerful, but reject too often if tails differ (`python -m benchmarks`).

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
        ratio_swap_test(*disjoint_halves(gram))[1],
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


TERMS = ("KL", "total")
# With fewer of either, no claim is made.
ENOUGH_BATCHES, ENOUGH_SNAPSHOTS = 64, 3


@dataclass(frozen=True, eq=False)
class NoiseSnapshot:
    """The gradients of B batches at one snapshot of training."""

    step: int  # number of optimizer steps before the snapshot
    # Inner products, shape [(1 + E) B, (1 + E) B]: first the gradients of the reward, then those of the
    # objective under each estimator
    gram: FloatArray
    estimators: Sequence[str]  # names of the E estimators

    def noise(self, term: str, estimator: str) -> float:
        """The trace of the covariance of a batch's gradient."""
        gram = self.between(term, [estimator])
        return float((np.trace(gram) - gram.mean() * len(gram)) / (len(gram) - 1))

    def signal_to_noise(self, term: str, estimator: str) -> float:
        """An unbiased estimate of the mean gradient's squared norm, divided by the noise of one batch."""
        gram = self.between(term, [estimator])
        pairs = len(gram) * (len(gram) - 1)
        return float((gram.sum() - np.trace(gram)) / pairs) / self.noise(term, estimator)

    def norm_variance(self, term: str, estimator: str) -> float:
        """The variance of the norm of a batch's gradient, over the batches."""
        # Differences of rounded entries may be below 0
        squares = np.diag(self.between(term, [estimator])).clip(min=0)
        return float(np.sqrt(squares).var(ddof=1))

    def between(self, term: str, estimators: Sequence[str]) -> FloatArray:
        """Gram matrix of one term's gradients under several estimators, concatenated.

        The gradient of the KL is that of the objective minus that of the reward.
        """
        blocks = np.arange(len(self.gram)).reshape(1 + len(self.estimators), -1)
        whole = blocks[[1 + self.estimators.index(name) for name in estimators]].ravel()
        reward = np.tile(blocks[0], len(estimators))
        if term == "KL":
            less = self.gram[whole] - self.gram[reward]
            return np.asarray(less[:, whole] - less[:, reward])
        indices = reward if term == "reward" else whole
        return np.asarray(self.gram[np.ix_(indices, indices)])


@dataclass(frozen=True, eq=False)
class NoiseFinding:
    """One comparison with the control at one snapshot, with its verdict."""

    snapshot: NoiseSnapshot
    term: str
    variance: GradientVariance
    verdict: Verdict


def compare_noise(
    snapshots: Sequence[NoiseSnapshot], control: str, alpha: float = 0.05
) -> list[NoiseFinding]:
    """Compare each estimator's gradient variance with the control's, per snapshot, for KL and objective.

    The correction is over all of them.

    Args:
        snapshots: At least one; with fewer than three no claim is made.
        control: The estimator with which the others are compared.
        alpha: Two-sided level.
    """
    findings = []
    for snapshot, term in product(snapshots, TERMS):
        for name in (name for name in snapshot.estimators if name != control):
            variance = compare_gradient_variance(snapshot.between(term, [name, control]))
            evidence = variance.log_ratio, LOG_RATIO, variance.test, variance.batches
            doubt, claim = _doubt(variance, len(snapshots)), _claim(term, name, snapshot.step)
            verdict = Verdict(claim, name, control, *evidence, doubt=doubt)
            findings.append(NoiseFinding(snapshot, term, variance, verdict))
    verdicts = corrected([one.verdict for one in findings], alpha)
    return [replace(one, verdict=verdict) for one, verdict in zip(findings, verdicts, strict=True)]


def _claim(term: str, treatment: str, step: int) -> Claim:
    of = f"{'the KL’s' if term == 'KL' else 'the whole'} gradient at step {step}"
    return Claim(
        f"noise of {term}",
        f"the variance of {of} under {treatment}",
        f"less variance in {of}",
        f"more variance in {of}",
        higher_is_better=False,
        unit_of_n="batch",
    )


def _doubt(variance: GradientVariance, snapshots: int) -> str:
    if max(variance.top_share) > HEAVY_SHARE:
        return "heavy tails, one batch has more than a fifth of the variance"
    if variance.batches < ENOUGH_BATCHES:
        return f"fewer than {ENOUGH_BATCHES} batches"
    return f"fewer than {ENOUGH_SNAPSHOTS} snapshots of training" if snapshots < ENOUGH_SNAPSHOTS else ""
