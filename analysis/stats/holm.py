"""Holm's correction over a family of tests."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.stats.pairs import FloatArray
from analysis.stats.swaps import SwapTest
from analysis.stats.verdict import Verdict

# Stands for a test that was not run.
NO_TEST = SwapTest(math.nan, math.nan, 0, 0, True)


def corrected(
    verdicts: Sequence[Verdict], alpha: float, *, planned: int = 0, withheld: str = ""
) -> list[Verdict]:
    """The verdicts of a family after correction, in the same order.

    Args:
        verdicts: The family.
        alpha: Two-sided level of the family.
        planned: Number of tests in the plan. Those that could not be run count with p = 1, as do untested
            claims.
        withheld: Why there is no verdict, or "".
    """
    size = max(len(verdicts), planned)
    adjusted = holm([verdict.test.p_value for verdict in verdicts], size)
    # Holm's correction is monotone in each p-value, so the smallest p-values give the smallest corrected ones
    attainable = holm([verdict.test.attainable for verdict in verdicts], size)
    level = alpha / max(1, size)
    return [
        replace(
            verdict,
            adjusted=float(p_value),
            attainable=float(least),
            alpha=alpha,
            level=level,
            withheld=withheld,
        )
        for verdict, p_value, least in zip(verdicts, adjusted, attainable, strict=True)
    ]


def holm(p_values: Sequence[float], size: int = 0) -> FloatArray:
    """Corrected p-values of a family of at least `size` tests; `nan` where there was no test.

    The i-th smallest of m p-values becomes the largest of (m − j + 1)·p_(j) over j ≤ i, at most 1.

    Source: S. Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of
    Statistics 6 (1979). Equal to statsmodels' `multipletests`, which collects garbage at each call.

    Example:
        >>> holm([0.01, float("nan"), 0.03], size=4).tolist()
        [0.04, nan, 0.09]
    """
    adjusted = np.array(p_values, dtype=np.float64)
    order = np.argsort(adjusted)[: np.count_nonzero(~np.isnan(adjusted))]  # nan comes last
    family = max(size, len(order))
    adjusted[order] = np.maximum.accumulate(adjusted[order] * np.arange(family, family - len(order), -1))
    return np.minimum(adjusted, 1.0)
