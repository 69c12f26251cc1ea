"""Holm's correction over a family of findings, and a verdict on each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats.claims import Claim
from analysis.stats.frontier import Share
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.swaps import SwapTest
from analysis.stats.verdict import Verdict

# Stands for a test that was not run.
NO_TEST = SwapTest(math.nan, math.nan, 0, 0, True)


@dataclass(frozen=True)
class Finding:
    """A claim with its evidence, before correction; for its fields see `Verdict`."""

    claim: Claim
    treatment: str
    control: str
    estimate: Estimate
    unit: str
    test: SwapTest
    replicates: int
    margin: float | None = None
    share: Share | None = None
    doubt: str = ""
    untested: str = ""
    note: str = ""

    @classmethod
    def about(
        cls,
        claim: Claim,
        pairs: Pairs,
        estimate: Estimate,
        unit: str,
        test: SwapTest,
        *,
        margin: float | None = None,
        share: Share | None = None,
        untested: str = "",
        note: str = "",
    ) -> "Finding":
        """A finding about the two arms of matched pairs."""
        return cls(
            claim,
            pairs.treatment,
            pairs.control,
            estimate,
            unit,
            test,
            pairs.replicates,
            margin=margin,
            share=share,
            untested=untested,
            note=note,
        )


def corrected(
    findings: Sequence[Finding], alpha: float, *, planned: int = 0, withheld: str = ""
) -> list[Verdict]:
    """Verdicts on all findings of a family, in the same order.

    Args:
        findings: The family.
        alpha: Two-sided level of the family.
        planned: Number of tests in the plan. Those that could not be run count with p = 1, as do untested
            findings.
        withheld: Why there is no verdict, or "".
    """
    size = max(len(findings), planned)
    if not findings:
        return []
    adjusted = _holm([finding.test.p_value for finding in findings], size)
    # Holm's correction is monotone in each p-value, so the smallest p-values give the smallest corrected ones
    attainable = _holm([finding.test.attainable for finding in findings], size)
    return [
        Verdict(
            **vars(finding),
            adjusted=float(p_value),
            attainable=float(least),
            alpha=alpha,
            level=alpha / size,
            withheld=withheld,
        )
        for finding, p_value, least in zip(findings, adjusted, attainable, strict=True)
    ]


def _holm(p_values: Sequence[float], size: int) -> FloatArray:
    """Corrected p-values: max over j <= i of (size - j) p_(j), at most 1; `nan` for untested findings."""
    given = np.array(p_values)
    order = np.argsort(given)  # `nan` is sorted last, as p = 1 would be
    steps = np.maximum.accumulate((size - np.arange(len(given))) * given[order])
    adjusted = np.empty_like(given)
    adjusted[order] = np.minimum(1.0, steps)
    return adjusted
