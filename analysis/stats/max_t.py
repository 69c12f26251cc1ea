"""More than two estimators: the maximum over comparisons with one control (Westfall and Young)."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from analysis.stats.objective import objective
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.swaps import RESAMPLES, unit_sums


def max_t_p_values(
    values: FloatArray,
    weights: FloatArray,
    *,
    control: int = 0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> FloatArray:
    """Single-step adjusted p-values of each estimator's mean difference to the control.

    The labels of all k estimators are permuted within each matched set. That is exact if all k are
    exchangeable. If only some are, the error rate of the others is not controlled: an estimator with less
    spread narrows the null distribution of all. Holm's correction of the pairwise swap tests has no such gap.

    Args:
        values: Outcome of each matched set (beta, replicate) under each estimator, shape [P, k]; finite.
        weights: Weight of each matched set, shape [P].
        control: Column of the control.
        resamples: Random permutations when enumeration would need more.
        seed: Seed of the random permutations.

    Returns:
        Two-sided p-values, adjusted for the k - 1 comparisons, shape [k]; `nan` for the control.
    """
    index = np.arange(values.size).reshape(values.shape)

    def differences(*drawn: FloatArray) -> FloatArray:
        totals = np.stack(
            [values.ravel()[np.asarray(column, dtype=np.int64)] @ weights for column in drawn], axis=-1
        )
        return np.abs(totals - totals[..., [control]])

    scale = float(np.abs(values).max(initial=0.0) * np.abs(weights).sum()) or 1.0

    def on_grid(drawn: FloatArray) -> FloatArray:
        return np.rint(drawn / scale * 2.0**40)

    result = stats.permutation_test(
        tuple(index.T),
        lambda *drawn, axis: on_grid(differences(*drawn).max(axis=-1)),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    null = result.null_distribution
    exact = len(null) < resamples
    observed = on_grid(differences(*index.T))
    counts = (null[:, None] >= observed).sum(axis=0)
    p_values = counts / len(null) if exact else (1 + counts) / (1 + len(null))
    p_values[control] = np.nan
    return np.asarray(p_values)


def objective_max_t(designs: Sequence[Pairs]) -> FloatArray | None:
    """p-values of every treatment's J = reward - beta * KL against the one control, all at once.

    Args:
        designs: Matched pairs of each treatment with the same control.

    Returns:
        One p-value a treatment; None with a diverged run, or where not all have the same matched pairs.
    """
    first = designs[0]
    if any(
        one.diverged.any()
        or not np.array_equal(one.beta_index, first.beta_index)
        or not np.array_equal(one.replicate, first.replicate)
        for one in designs
    ):
        return None
    values = np.column_stack([objective(first)[:, 1], *(objective(one)[:, 0] for one in designs)])
    for index in first.beta_indices:
        rows = first.beta_index == index
        values[rows] /= values[rows].std() or 1.0
    sums = np.stack([unit_sums(column, first.unit) for column in values.T], axis=1)
    return max_t_p_values(sums, np.ones(len(sums)))[1:]
