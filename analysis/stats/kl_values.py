"""Spread and bias of KL estimates, all computed on the same completions of the same prompts.

Unbiasedness is tested as equivalence within a margin: "not significantly biased" does not imply unbiased. If
a model can be enumerated, it is verified exactly instead. A sample never overrules a theorem: where values
that dominate a mean are too rare to be drawn, an unbiased estimate misses it in nearly every sample.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from scipy import stats

from analysis.stats.intervals import Estimate, Interval, log_ratio
from analysis.stats.pairs import FloatArray

# Level of each test.
ALPHA = 0.05
# A distribution with at least this tail index has no variance; with fewer values in the tail the index cannot
# be estimated.
_NO_VARIANCE = 0.5
_ENOUGH_IN_TAIL = 20


class BiasOutcome(Enum):
    """What can be concluded about a bias."""

    EQUIVALENT = "unbiased within the margin"
    THEOREM = "unbiased (theorem)"
    BIASED = "biased"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class BiasVerdict:
    """An estimated bias and its tests."""

    estimate: Estimate  # the bias, in the unit of `margin`
    margin: float  # largest bias that is regarded as none, fixed in the plan
    tail: float = math.nan  # `tail_index` of the differences whose mean is tested; NaN if unknown
    family: int = 1  # number of biases over which both tests are corrected
    theorem: bool = False  # whether the estimator is unbiased by a theorem

    @property
    def difference_p(self) -> float:
        """The p-value of the two-sided test of no bias, corrected."""
        return float(np.minimum(1.0, self.estimate.p_value * self.family))

    @property
    def level(self) -> float:
        """The level of the interval: 90% for a single bias."""
        return 1 - 2 * ALPHA / self.family

    @property
    def interval(self) -> Interval | None:
        """The interval that means equivalence if it is within the margin (TOST)."""
        return self.estimate.interval(self.level)

    @property
    def heavy_tailed(self) -> bool:
        """Whether the tail is too heavy for the standard error of a mean, and therefore for both tests.

        The mean may then be dominated by values so rare that the samples contain none of them.
        """
        return self.tail >= _NO_VARIANCE

    @property
    def outcome(self) -> BiasOutcome:
        """Biased if there is a difference beyond the margin; inconclusive if the tail is heavy."""
        if self.heavy_tailed:
            return BiasOutcome.THEOREM if self.theorem else BiasOutcome.INCONCLUSIVE
        if self.interval is not None and self.interval.within(self.margin):
            return BiasOutcome.EQUIVALENT
        if self.theorem:
            return BiasOutcome.THEOREM
        if self.difference_p <= ALPHA and abs(self.estimate.value) > self.margin:
            return BiasOutcome.BIASED
        return BiasOutcome.INCONCLUSIVE


def reference_bias(values: FloatArray, reference: FloatArray, *, tolerance: float = 0.01) -> BiasVerdict:
    """Test whether estimates have the same mean as an unbiased reference estimator on the same samples.

    Args:
        values: Estimates, shape [N].
        reference: Estimates of the reference from the same samples, shape [N].
        tolerance: Margin as a fraction of the reference's mean.
    """
    differences = values - reference
    margin = abs(tolerance * float(reference.mean()))
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return BiasVerdict(Estimate(float(differences[0]), 0.0, math.inf), margin)
    return BiasVerdict(Estimate.of_mean(differences), margin, tail_index(differences))


def standard_bias(
    values: FloatArray, standard: FloatArray, standard_error: FloatArray, *, tolerance: float = 0.01
) -> BiasVerdict:
    """Test whether estimates have a mean that is known exactly, or from an independent sample.

    What is found holds for these prompts: the variance is that of their completions and of the independent
    sample (Welch).

    Args:
        values: Independent estimates for each prompt, shape [P, N].
        standard: The KL of each prompt, shape [P].
        standard_error: Its standard errors, shape [P]; zeros if exact.
        tolerance: Margin as a fraction of the mean of `standard`.

    Example:
        >>> values = np.random.default_rng(0).normal(1.0, 0.1, size=(4, 1000))
        >>> standard_bias(values, np.ones(4), np.zeros(4), tolerance=0.05).outcome.name
        'EQUIVALENT'
        >>> standard_bias(values + 0.2, np.ones(4), np.zeros(4), tolerance=0.05).outcome.name
        'BIASED'
    """
    prompts, count = values.shape
    bias = float(values.mean() - standard.mean())
    noise, others = values.var(axis=1, ddof=1) / count, standard_error**2
    error = float(np.sqrt((noise + others).sum()) / prompts)
    margin = abs(tolerance * float(standard.mean()))
    if error == 0:  # known exactly
        return BiasVerdict(Estimate(bias, 0.0, math.inf), margin)
    degrees = float((noise + others).sum() ** 2 / (noise**2).sum() * (count - 1)) if noise.any() else math.inf
    deviations = (values - values.mean(axis=1, keepdims=True)).ravel()
    return BiasVerdict(Estimate(bias, error, degrees), margin, tail_index(deviations))


def tail_index(values: FloatArray) -> float:
    """Shape k of the generalised Pareto distribution fitted to the largest deviations from the median.

    Moments of order below 1 / k exist: with k >= 1/2 there is no variance, with k >= 1 no mean. The tail
    consists of the largest min(N / 5, 3 sqrt(N)) deviations, both sides together.

    Args:
        values: Independent samples, shape [N].

    Returns:
        k; NaN with fewer than 20 values in the tail, which are too few to estimate it.

    Example:
        >>> light, heavy = np.random.default_rng(0).lognormal(sigma=[[0.1], [3.0]], size=(2, 1000))
        >>> tail_index(light) < 0.5 < tail_index(heavy)
        True

    Reference: Vehtari, Simpson, Gelman, Yao, Gabry (2024), Pareto smoothed importance sampling, JMLR 25(72).
    """
    deviations = np.sort(np.abs(values - np.median(values)))
    count = int(min(len(values) / 5, 3 * np.sqrt(len(values))))
    excesses = deviations[-count:] - deviations[-count - 1]
    excesses = excesses[excesses > 0]  # ties reduce their number
    if len(excesses) < _ENOUGH_IN_TAIL:
        return math.nan
    return float(stats.genpareto.fit(excesses, floc=0)[0])


REFERENCE = "k1"
"""The estimate with which the others are compared; unbiased by the definition of the KL."""
# Unbiased by a theorem, if completions are samples of the policy: control variates with a mean of 0 that is
# known, fitted to other prompts; conditional expectations; and weights by inclusion probabilities.
UNBIASED = {REFERENCE, "k3", "cv", "cv_fitted", "rb", "ht"}


def missed_mass(values: Mapping[str, FloatArray]) -> float:
    """The share of the reference's mass that the completions miss: 1 - mean of q(y) / p(y); `nan` if unknown.

    The control variate with a coefficient of 1 is k1 + q(y) / p(y) - 1.
    """
    return float((values[REFERENCE] - values["cv"]).mean()) if "cv" in values else math.nan


@dataclass(frozen=True, eq=False)
class EstimatorSpread:
    """One estimator of the KL."""

    mean: Estimate  # mean over all completions, with its standard error over prompts
    # Standard deviation of the estimate from M completions of one prompt, by M: the square root of the mean
    # variance over prompts
    deviations: Mapping[int, float]
    # Log of the ratio of that variance to the reference's at the largest M, with a jackknife standard error
    # over prompts
    log_ratio: Estimate
    # Test of whether it has the mean of the reference, or a KL known otherwise; None for the reference on the
    # same completions
    bias: BiasVerdict | None


def estimator_spreads(
    values: Mapping[str, FloatArray],
    horvitz_thompson: Mapping[int, FloatArray],
    sizes: Sequence[int],
    *,
    tolerance: float = 0.01,
    standard: tuple[FloatArray, FloatArray] | None = None,
    snapshots: int = 1,
) -> dict[str, EstimatorSpread]:
    """Means, spreads and biases of every estimator.

    Args:
        values: One estimate per completion, shape [P, N], by name; an estimate from M completions is the mean
            of M of them.
        horvitz_thompson: One estimate per M completions, shape [P, N / M], by M.
        sizes: The numbers of completions (M) to report.
        tolerance: Margin of the bias as a fraction of the KL.
        standard: The KL of each prompt and its standard error, [P] each, with which means are compared; None
            for the reference on the same completions.
        snapshots: Number of snapshots over whose biases the tests are corrected.

    Raises:
        ValueError: If the reference is missing, or there are fewer than two prompts or completions.
    """
    reference = values.get(REFERENCE)
    if reference is None or min(reference.shape) < 2:
        raise ValueError(f"values must hold {REFERENCE!r} for at least 2 prompts and 2 completions of each")
    largest = max(sizes)
    by_size = {
        name: {size: value.reshape(len(value), -1, size).mean(axis=2) for size in sizes}
        for name, value in values.items()
    } | {"ht": {size: horvitz_thompson[size] for size in sizes}}
    within = {
        # The variance of a mean of independent estimates follows from theirs, which is known more precisely
        name: {size: value.var(axis=1, ddof=1) / size for size in sizes}
        for name, value in values.items()
    } | {"ht": {size: horvitz_thompson[size].var(axis=1, ddof=1) for size in sizes}}
    family = snapshots * (len(by_size) - (standard is None))
    spreads = {}
    for name, groups in by_size.items():
        of_size, bias = groups[largest], None
        if standard is not None:
            bias = standard_bias(of_size, *standard, tolerance=tolerance)
        elif name != REFERENCE:
            bias = reference_bias(of_size.ravel(), by_size[REFERENCE][largest].ravel(), tolerance=tolerance)
        both = np.stack([within[name][largest], within[REFERENCE][largest]])
        sums = both.sum(axis=1)  # over prompts
        spreads[name] = EstimatorSpread(
            Estimate.of_mean(of_size.mean(axis=1)),
            {size: float(np.sqrt(within[name][size].mean())) for size in sizes},
            log_ratio(sums, sums[:, None] - both),
            bias and replace(bias, family=family, theorem=name in UNBIASED),
        )
    return spreads
