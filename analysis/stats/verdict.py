"""`Verdict`: a claim with its evidence and conclusion, from which the report's sentences are made.

The outcome is computed from the evidence and cannot be set. Every sentence includes the estimate with its
unit and interval, the corrected p-value and the number of replicates. "Better" and "worse" are said of arms
by the verdict on the primary outcome only.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

import numpy as np

from analysis.stats.claims import Claim
from analysis.stats.contrast import LOG_RATIO, RANKS, Contrast, TTest, independent, mean_of
from analysis.stats.intervals import Estimate, Interval, detectable
from analysis.stats.pairs import Pairs
from analysis.stats.swaps import SwapTest, mean_swap_test
from analysis.stats.text import (
    count,
    ends_text,
    evidence_text,
    interval_text,
    number,
    probability,
    signed,
    these_blocks,
)

# Relative rounding error of p-values, which could otherwise decide between processors.
_ROUNDING = 1e-9


class Outcome(Enum):
    """The possible conclusions of a comparison."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    CANNOT_REJECT = "cannot reject at this design"
    NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Verdict:
    """One claim about a treatment and a control, with its evidence."""

    claim: Claim
    treatment: str  # label of the arm under study
    control: str  # label of the arm it is compared with
    estimate: Estimate  # the difference (or log ratio) with its standard error
    unit: str
    test: SwapTest | TTest  # the test of no difference that decides
    replicates: int  # n; for a sweep never the number of prompts, steps or batches
    alpha: float = 0.05  # level of the family of tests
    family: int = 1  # number of tests in the family, for which it is corrected
    # Equivalence margin fixed in the plan, in `unit`; None if equivalence is never concluded
    margin: float | None = None
    doubt: str = ""  # why the result is inconclusive whatever the test, or ""
    withheld: str = ""  # why there is no verdict, or ""
    note: str = ""  # additional evidence, or ""
    blocks: int = 0  # number of blocks of the replicates; 0 without blocks
    beside: SwapTest | TTest | None = None  # the other test of the same differences
    gain: Estimate | None = None  # what the control gained in training; None if unknown
    over_prompts: Estimate | None = None  # the estimate with the error of the prompts, too; None if unknown

    @classmethod
    def about(cls, claim: Claim, pairs: Pairs, estimate: Estimate, unit: str, test: SwapTest | TTest) -> Self:
        """A verdict on the two arms of matched pairs, not yet corrected."""
        blocks = len(np.unique(pairs.block)) if pairs.blocks else 0
        arms = pairs.treatment, pairs.control
        return cls(claim, *arms, estimate, unit, test, pairs.replicates, blocks=blocks)

    @classmethod
    def on(cls, claim: Claim, pairs: Pairs, contrast: Contrast, variance: float = 0.0) -> Self:
        """A verdict on the mean of a contrast; not yet corrected.

        Independent values are tested by the t test of their mean, which can reject with few of them; pairs
        that are pooled over betas by swaps, which keep their level whatever the betas' spreads. The other
        stands beside it. Skewed differences and collapses mislead both alike (`python -m benchmarks`).

        Args:
            claim: The claim.
            pairs: The matched pairs.
            contrast: Their differences.
            variance: Variance of an independent error of the mean, which tests and interval include.
        """
        mean, values = mean_of(contrast, pairs).widened(variance), independent(contrast, pairs)
        over, least = values is not None and pairs.over_blocks, 0.0 if mean.degrees > 0 else 1.0
        t_test = TTest(mean.p_value, round(mean.degrees) + 1, over, least)
        if values is not None:
            swaps = mean_swap_test(values, variance=variance)
            return replace(cls.about(claim, pairs, mean, contrast.unit, t_test), beside=swaps)
        swaps = mean_swap_test(contrast.values, contrast.weights, pairs.unit, variance=variance)
        verdict = cls.about(claim, pairs, mean, contrast.unit, swaps)
        return verdict if contrast.ranked else replace(verdict, beside=t_test)

    @property
    def adjusted(self) -> float:
        """The corrected p-value (Bonferroni)."""
        return float(np.minimum(1.0, self.test.p_value * self.family))

    @property
    def attainable(self) -> float:
        """The smallest attainable corrected p-value."""
        return float(np.minimum(1.0, self.test.attainable * self.family))

    @property
    def level(self) -> float:
        """The level of the test, its interval, the equivalence test and the detectable difference."""
        return self.alpha / self.family

    @property
    def rejects(self) -> bool:
        """Whether the test that decides rejects."""
        return _rejects(self.test, self.level)

    @property
    def outcome(self) -> Outcome:
        """The conclusion from the evidence."""
        if self.withheld:
            return Outcome.NO_VERDICT
        value = self.estimate.value
        if self.doubt or math.isnan(value):
            return Outcome.INCONCLUSIVE
        if self.rejects and value != 0:
            return Outcome.BETTER if (value > 0) == self.claim.higher_is_better else Outcome.WORSE
        if self.within_margin and self.trained:
            return Outcome.EQUIVALENT
        possible = not self.attainable > self.alpha * (1 + _ROUNDING)
        return Outcome.INCONCLUSIVE if possible else Outcome.CANNOT_REJECT

    @property
    def within_margin(self) -> bool:
        """Whether both one-sided tests of equivalence reject, each at the level: TOST."""
        both = self._interval(2 * self.level) if self.margin else None
        return bool(self.margin and both and both.within(self.margin))

    @property
    def trained(self) -> bool:
        """Whether the control gained more than the margin; arms that train nothing are equal, too."""
        gain = self.gain and self.gain.interval(1 - self.level)
        return bool(self.margin and gain and gain.low > self.margin)

    @property
    def interval(self) -> Interval | None:
        """The interval of the estimate, simultaneous with those of its family.

        It is that of the test, and excludes 0 if and only if the test rejects.
        """
        return self._interval(self.level)

    def _interval(self, level: float) -> Interval | None:
        """The interval of the test at a two-sided level."""
        if isinstance(self.test, SwapTest) and self.test.interval is not None:
            return self.test.interval(level)
        return self.estimate.interval(1 - level)

    @property
    def detectable(self) -> float | None:
        """The difference that such a design detects with 80 % power; None if unknown or none."""
        mean = self.estimate
        if not mean.standard_error > 0:
            return None
        reach = detectable(self.test.units, self.level, self.test.attainable, mean.degrees)
        return None if reach is None else reach * mean.standard_error

    @property
    def disagreement(self) -> str:
        """A sentence if the other test of the same differences says otherwise, or ""."""
        if self.beside is None or _rejects(self.beside, self.level) == self.rejects:
            return ""
        does = "does not reject" if self.rejects else "rejects"
        named = "swap test" if isinstance(self.beside, SwapTest) else "t test"
        return (
            f"The {named} of the same differences of {self.treatment} {does} at this level: "
            f"{probability(self.beside.p_value)}."
        )

    @property
    def label(self) -> str:
        """The outcome in the words of the claim, for tables."""
        if self.doubt:
            return f"{self.outcome.value}: {self.doubt}"
        if self.by_ranks and self.outcome in (Outcome.BETTER, Outcome.WORSE):
            # Ranks may differ in another direction than the values of the runs that have one
            return f"ranks {'higher' if self.estimate.value > 0 else 'lower'} in {self.claim.subject}"
        return {Outcome.BETTER: self.claim.favourable, Outcome.WORSE: self.claim.unfavourable}.get(
            self.outcome, self.outcome.value
        )

    @property
    def sentence(self) -> str:
        """The finding in one or two sentences."""
        if self.withheld:
            return f"There is no verdict on {self.claim.subject}: {self.withheld}."
        evidence = f"{self._difference()}; {evidence_text(self.test, self.level)}"
        if not math.isclose(self.adjusted, self.test.p_value, rel_tol=_ROUNDING):
            evidence += f", {probability(self.adjusted)} after correction"
        evidence += f"; {self._counts()}"
        return " ".join(filter(None, (self._conclusion(evidence), self.disagreement)))

    def _conclusion(self, evidence: str) -> str:
        subject, arms = self.claim.subject, f"{self.treatment} against {self.control}"
        match self.outcome:
            case Outcome.BETTER | Outcome.WORSE:
                verb = "" if self.by_ranks else "has "
                return f"{self.treatment} {verb}{self.label} than {self.control} ({evidence})."
            case Outcome.EQUIVALENT:
                return (
                    f"{self.treatment} and {self.control} are equivalent in {subject} within the planned "
                    f"margin of ±{number(self.margin)} {self.unit} ({evidence})."
                )
            case Outcome.CANNOT_REJECT:
                return (
                    f"On {subject}, {arms}, there are too few runs for a test: the smallest possible "
                    f"{probability(self.attainable)} is above {self.alpha:g} ({evidence})."
                )
            case _:
                why = f": {self.doubt}" if self.doubt else self._untrained()
                return f"On {subject}, {arms}, the result is inconclusive{why} ({evidence})."

    def _untrained(self) -> str:
        """Why a difference within the margin is no equivalence, or ""."""
        if not self.within_margin or self.trained:
            return ""
        if self.gain is None:
            return ": within the margin, but whether anything trained is unknown"
        return (
            f": within the margin, but the control gained {number(self.gain.value)} "
            f"({ends_text(self.gain.interval(1 - self.level))}), which may be no more than the margin"
        )

    @property
    def by_ranks(self) -> bool:
        """Whether differences are those of ranks, as a run diverged."""
        return self.unit == RANKS

    @property
    def over_blocks(self) -> bool:
        """Whether the claim is about blocks like these, and not only about these."""
        return isinstance(self.test, TTest) and self.test.over_blocks

    def _counts(self) -> str:
        n = count(self.replicates, self.claim.unit_of_n)
        over = f"{count(self.blocks, 'block')} of {n} in all"
        n = over if self.over_blocks else f"{n} {these_blocks(self.blocks)}"
        return "; ".join(filter(None, (f"n\u00a0=\u00a0{n.strip()}", self.note)))

    def _difference(self) -> str:
        if self.unit == LOG_RATIO:
            interval = self.interval and self.interval.exp()
            return f"ratio {number(math.exp(self.estimate.value))}, {interval_text(interval)}"
        return f"difference {signed(self.estimate.value)} {self.unit}, {interval_text(self.interval)}"


def _rejects(test: SwapTest | TTest, level: float) -> bool:
    return test.p_value <= level * (1 + _ROUNDING)
