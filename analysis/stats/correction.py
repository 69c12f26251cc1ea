"""One-step correction of a family of tests, at one level for p-values and intervals.

Each of m tests is done at level alpha / m (Bonferroni), and so is its interval: a corrected p-value is at
most alpha if and only if the interval excludes 0. A step-down correction such as Holm's rejects more, but its
p-values have no intervals that agree with them.
"""

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
        planned: Number of tests in the plan, including those that could not be run.
        withheld: Why there is no verdict, or "".
    """
    size = max(1, len(verdicts), planned)
    adjusted = one_step([verdict.test.p_value for verdict in verdicts], size)
    attainable = one_step([verdict.test.attainable for verdict in verdicts], size)
    return [
        replace(
            verdict,
            adjusted=float(p_value),
            attainable=float(least),
            alpha=alpha,
            level=alpha / size,
            withheld=withheld,
        )
        for verdict, p_value, least in zip(verdicts, adjusted, attainable, strict=True)
    ]


def one_step(p_values: Sequence[float], size: int = 0) -> FloatArray:
    """Corrected p-values of a family of at least `size` tests; `nan` where there was no test.

    Example:
        >>> one_step([0.01, float("nan"), 0.3], size=4).tolist()
        [0.04, nan, 1.0]
    """
    found = np.array(p_values, dtype=np.float64)
    return np.asarray(np.minimum(1.0, found * max(size, int((~np.isnan(found)).sum()))))
