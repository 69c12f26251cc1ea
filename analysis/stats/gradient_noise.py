"""Variance of the gradients of KL, reward and objective under several estimators, from one Gram matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats.claims import Claim
from analysis.stats.correction import corrected, one_step
from analysis.stats.gradient_variance import GradientVariance, compare_gradient_variance
from analysis.stats.kl_reward import LOG_RATIO
from analysis.stats.pairs import FloatArray
from analysis.stats.swaps import swap_test
from analysis.stats.verdict import Verdict

TERMS = ("KL", "total")
# With fewer of either, no claim is made.
ENOUGH_BATCHES, ENOUGH_SNAPSHOTS = 64, 3


@dataclass(frozen=True, eq=False)
class NoiseSnapshot:
    """The gradients of B batches at one snapshot of training.

    Attributes:
        step: Number of optimizer steps before the snapshot.
        gram: Inner products, shape [(1 + E) B, (1 + E) B]: first the gradients of the reward, then those of
            the objective under each estimator.
        estimators: Names of the E estimators.
    """

    step: int
    gram: FloatArray
    estimators: Sequence[str]

    @property
    def batches(self) -> int:
        """Number of batches, B."""
        return len(self.gram) // (1 + len(self.estimators))

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
        count = self.batches
        rows = np.zeros((len(estimators) * count, len(self.gram)))
        for index, estimator in enumerate(estimators):
            place = slice(index * count, (index + 1) * count)
            first = (1 + self.estimators.index(estimator)) * count
            if term != "reward":
                rows[place, first : first + count] = np.eye(count)
            if term != "total":
                rows[place, :count] = np.eye(count) * (1 if term == "reward" else -1)
        return np.asarray(rows @ self.gram @ rows.T)


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

    The tests flip signs of disjoint pairs of batches, which is exact for any number of batches and different
    means. The correction is over all of them.

    Args:
        snapshots: At least one; with fewer than three no claim is made.
        control: The estimator with which the others are compared.
        alpha: Two-sided level.
    """
    compared = [
        (snapshot, term, name, compare_gradient_variance(snapshot.between(term, [name, control])))
        for snapshot in snapshots
        for term in TERMS
        for name in snapshot.estimators
        if name != control
    ]
    verdicts = corrected(
        [
            Verdict(
                _claim(term, name, snapshot.step),
                name,
                control,
                variance.log_ratio,
                LOG_RATIO,
                variance.exact_test,
                variance.batches,
                doubt=_doubt(variance, len(snapshots)),
            )
            for snapshot, term, name, variance in compared
        ],
        alpha,
    )
    return [
        NoiseFinding(snapshot, term, variance, verdict)
        for (snapshot, term, _, variance), verdict in zip(compared, verdicts, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class LayerFinding:
    """The variance of one layer's gradient under an estimator, relative to the control's.

    Attributes:
        ratio: Ratio of the variances.
        p: Two-sided p of exact sign flips of the differences between disjoint pairs of batches.
        p_adjusted: The same corrected for all layers, terms and estimators of the snapshot.
    """

    layer: str
    term: str
    estimator: str
    ratio: float
    p: float
    p_adjusted: float


def compare_layers(
    layers: Mapping[str, Mapping[str, FloatArray]], estimators: Sequence[str], control: str
) -> list[LayerFinding]:
    """Compare the variance of every layer's gradient with the control's.

    Args:
        layers: Layer -> term -> half the squared distances of disjoint pairs of batches, shape [E, B / 2].
        estimators: Names of the E estimators.
        control: The estimator with which the others are compared.
    """
    compared = [
        (layer, term, name, own, halves[estimators.index(control)])
        for layer, by_term in layers.items()
        for term, halves in by_term.items()
        for name, own in zip(estimators, halves, strict=True)
        if name != control
    ]
    p_values = [swap_test(theirs - own).p_value for *_, own, theirs in compared]
    return [
        LayerFinding(layer, term, name, float(own.mean() / theirs.mean()), p, adjusted)
        for (layer, term, name, own, theirs), p, adjusted in zip(
            compared, p_values, one_step(p_values).tolist(), strict=True
        )
    ]


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
    if variance.heavy_tailed:
        return "heavy tails, one batch has more than a fifth of the variance"
    if variance.batches < ENOUGH_BATCHES:
        return f"fewer than {ENOUGH_BATCHES} batches"
    return f"fewer than {ENOUGH_SNAPSHOTS} snapshots of training" if snapshots < ENOUGH_SNAPSHOTS else ""
