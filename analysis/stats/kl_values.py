"""Spread and bias of KL estimates, all computed on the same completions of the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.stats.bias import BiasVerdict, reference_bias, standard_bias
from analysis.stats.correction import one_step
from analysis.stats.intervals import Estimate, log_ratio
from analysis.stats.pairs import FloatArray

REFERENCE = "k1"
"""The estimate with which the others are compared; unbiased by the definition of the KL."""


@dataclass(frozen=True, eq=False)
class EstimatorSpread:
    """One estimator of the KL.

    Attributes:
        mean: Mean over all completions, with its standard error over prompts.
        deviations: Standard deviation of the estimate from M completions of one prompt, by M: the square root
            of the mean variance over prompts.
        log_ratio: Log of the ratio of that variance to the reference's at the largest M, with a jackknife
            standard error over prompts.
        bias: Test of whether it has the mean of the reference, or a KL known otherwise; None for the
            reference on the same completions.
    """

    mean: Estimate
    deviations: Mapping[int, float]
    log_ratio: Estimate
    bias: BiasVerdict | None


def estimator_spreads(
    values: Mapping[str, FloatArray],
    horvitz_thompson: Mapping[int, FloatArray],
    sizes: Sequence[int],
    *,
    tolerance: float = 0.01,
    standard: tuple[FloatArray, FloatArray] | None = None,
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

    Raises:
        ValueError: If the reference is missing, or there are fewer than two prompts or completions.
    """
    reference = values.get(REFERENCE)
    if reference is None or min(reference.shape) < 2:
        raise ValueError(f"values must hold {REFERENCE!r} for at least 2 prompts and 2 completions of each")
    largest = max(sizes)
    averaged = {
        name: {size: value.reshape(len(value), -1, size).mean(axis=2) for size in sizes}
        for name, value in values.items()
    }
    by_size = {**averaged, "ht": {size: horvitz_thompson[size] for size in sizes}}
    within = {
        # The variance of a mean of independent estimates follows from theirs, which is known more precisely
        name: {size: value.var(axis=1, ddof=1) / size for size in sizes}
        for name, value in values.items()
    } | {"ht": {size: horvitz_thompson[size].var(axis=1, ddof=1) for size in sizes}}
    return {
        name: EstimatorSpread(
            Estimate.of_mean(groups[largest].mean(axis=1)),
            {size: float(np.sqrt(within[name][size].mean())) for size in sizes},
            _variance_ratio(within[name][largest], within[REFERENCE][largest]),
            _bias(name, {name: found[largest] for name, found in by_size.items()}, standard, tolerance),
        )
        for name, groups in by_size.items()
    }


def _variance_ratio(variances: FloatArray, reference: FloatArray) -> Estimate:
    """Log of the ratio of two variances, each summed over prompts."""
    both = np.stack([variances, reference])
    sums = both.sum(axis=1)
    return log_ratio(sums, sums[:, None] - both)


def _bias(
    name: str,
    groups: Mapping[str, FloatArray],
    standard: tuple[FloatArray, FloatArray] | None,
    tolerance: float,
) -> BiasVerdict | None:
    if standard is not None:
        return standard_bias(groups[name], *standard, tolerance=tolerance)
    if name == REFERENCE:
        return None
    return reference_bias(groups[name].ravel(), groups[REFERENCE].ravel(), tolerance=tolerance)


def corrected_biases(
    snapshots: Mapping[int, Mapping[str, EstimatorSpread]],
) -> dict[int, dict[str, EstimatorSpread]]:
    """The same spreads, the tests of their biases corrected for the number of all.

    Args:
        snapshots: Results of `estimator_spreads` by step.
    """
    size = sum(spread.bias is not None for found in snapshots.values() for spread in found.values())

    def corrected(bias: BiasVerdict) -> BiasVerdict:
        equivalence, difference = one_step([bias.equivalence_p, bias.difference_p], size)
        return replace(bias, equivalence_p=float(equivalence), difference_p=float(difference), family=size)

    return {
        step: {
            name: replace(spread, bias=spread.bias and corrected(spread.bias))
            for name, spread in found.items()
        }
        for step, found in snapshots.items()
    }
