"""Findings that are tested together: Holm's correction over the whole family, then a verdict each."""

from collections.abc import Sequence
from dataclasses import dataclass

from statsmodels.stats.multitest import multipletests

from analysis.stats.frontier import Share
from analysis.stats.intervals import Estimate
from analysis.stats.swaps import SwapTest
from analysis.stats.verdict import Claim, Verdict


@dataclass(frozen=True)
class Finding:
    """A claim with its evidence, before correction; the fields are those of `Verdict`."""

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


def corrected(findings: Sequence[Finding], alpha: float) -> list[Verdict]:
    """A verdict on each finding of a family, in their order.

    Args:
        findings: The family.
        alpha: Its two-sided level.
    """
    if not findings:
        return []
    adjusted = multipletests([f.test.p_value for f in findings], method="holm")[1]
    # Holm's correction is monotone in every p-value: the smallest ones give the smallest corrected ones
    attainable = multipletests([f.test.attainable for f in findings], method="holm")[1]
    return [
        Verdict(**vars(finding), adjusted=float(p_value), attainable=float(least), alpha=alpha)
        for finding, p_value, least in zip(findings, adjusted, attainable, strict=True)
    ]
