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
from analysis.stats.contrast import LOG_RATIO, RANKS, Contrast, TTest, mean_of, over_blocks
from analysis.stats.frontier import Share
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.pairs import Pairs
from analysis.stats.swaps import SwapTest, mean_swap_test
from analysis.stats.text import (
    count,
    evidence_text,
    interval_text,
    number,
    probability,
    ratio_text,
    share_text,
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
    NOT_TESTED = "not tested"
    NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Verdict:
    """One claim about a treatment and a control, with its evidence."""

    claim: Claim
    treatment: str  # label of the arm under study
    control: str  # label of the arm it is compared with
    estimate: Estimate  # the difference (or log ratio) with its standard error
    unit: str
    test: SwapTest | TTest  # the test of no difference: a swap test, or a t test
    replicates: int  # n; for a sweep never the number of prompts, steps or batches
    alpha: float = 0.05  # level of the family of tests
    family: int = 1  # number of tests in the family, for which it is corrected
    # Equivalence margin fixed in the plan, in `unit`; None if equivalence is never concluded
    margin: float | None = None
    share: Share | None = None  # the counts of a claim on frontier shares, shown instead of the difference
    doubt: str = ""  # why the result is inconclusive whatever the test, or ""
    untested: str = ""  # why there is no test, or ""
    withheld: str = ""  # why there is no verdict, or ""
    note: str = ""  # additional evidence, or ""
    blocks: int = 0  # number of blocks of the replicates; 0 without blocks

    @classmethod
    def about(cls, claim: Claim, pairs: Pairs, estimate: Estimate, unit: str, test: SwapTest | TTest) -> Self:
        """A verdict on the two arms of matched pairs, not yet corrected."""
        blocks = len(np.unique(pairs.block)) if pairs.blocks else 0
        arms = pairs.treatment, pairs.control
        return cls(claim, *arms, estimate, unit, test, pairs.replicates, blocks=blocks)

    @classmethod
    def on(cls, claim: Claim, pairs: Pairs, contrast: Contrast, variance: float = 0.0) -> Self:
        """A verdict on the mean of a contrast, by its swap test or over blocks; not yet corrected.

        Args:
            claim: The claim.
            pairs: The matched pairs.
            contrast: Their differences.
            variance: Variance of an independent error of the mean, which test and interval include.
        """
        mean = mean_of(contrast, pairs).widened(variance)
        test = (
            TTest(mean.p_value, round(mean.degrees) + 1)
            if over_blocks(contrast, pairs)
            else mean_swap_test(contrast.values, contrast.weights, pairs.unit, variance=variance)
        )
        return cls.about(claim, pairs, mean, contrast.unit, test)

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
    def outcome(self) -> Outcome:
        """The conclusion from the evidence."""
        if self.withheld:
            return Outcome.NO_VERDICT
        if self.untested:
            return Outcome.NOT_TESTED
        if self.doubt:
            return Outcome.INCONCLUSIVE
        alpha, value = self.alpha * (1 + _ROUNDING), self.estimate.value
        if self.adjusted <= alpha and value != 0 and not math.isnan(value):
            return Outcome.BETTER if (value > 0) == self.claim.higher_is_better else Outcome.WORSE
        # Both one-sided tests of equivalence reject, each at the level: TOST
        both = self._interval(2 * self.level) if self.margin else None
        if self.margin and both and both.within(self.margin):
            return Outcome.EQUIVALENT
        possible = math.isnan(self.attainable) or self.attainable <= alpha
        return Outcome.INCONCLUSIVE if possible else Outcome.CANNOT_REJECT

    @property
    def interval(self) -> Interval | None:
        """The interval of the estimate, simultaneous with those of its family except for a share.

        It is that of the test, and excludes 0 if and only if the test rejects.
        """
        if self.share is not None:
            return self.share.interval
        interval, (low, high) = self._interval(self.level), self.claim.bounds
        return interval and replace(interval, low=max(low, interval.low), high=min(high, interval.high))

    def _interval(self, level: float) -> Interval | None:
        """The interval of the test at a two-sided level."""
        if isinstance(self.test, SwapTest) and self.test.interval is not None:
            return self.test.interval(level)
        return self.estimate.interval(1 - level)

    @property
    def label(self) -> str:
        """The outcome in the words of the claim, for tables."""
        if self.doubt or self.untested:
            return f"{self.outcome.value}: {self.doubt or self.untested}"
        if self.by_ranks and self.outcome in (Outcome.BETTER, Outcome.WORSE):
            # Ranks may differ in another direction than the values of the runs that have one
            return f"ranks {'higher' if self.estimate.value > 0 else 'lower'} in {self.claim.subject}"
        return {Outcome.BETTER: self.claim.favourable, Outcome.WORSE: self.claim.unfavourable}.get(
            self.outcome, self.outcome.value
        )

    @property
    def sentence(self) -> str:
        """The finding in one or two sentences."""
        if self.untested:
            return self._not_tested()
        if self.withheld:
            return f"There is no verdict on {self.claim.subject}: {self.withheld}."
        evidence = f"{self._difference()}; {evidence_text(self.test, self.level)}"
        if not math.isclose(self.adjusted, self.test.p_value, rel_tol=_ROUNDING):
            evidence += f", {probability(self.adjusted)} after correction"
        evidence += f"; {self._counts()}"
        subject, arms = self.claim.subject, f"{self.treatment} against {self.control}"
        match self.outcome:
            case Outcome.BETTER | Outcome.WORSE:
                verb = "" if self.by_ranks else "has "
                text = f"{self.treatment} {verb}{self.label} than {self.control} ({evidence})."
                return f"{text} {self.claim.caveat}".strip()
            case Outcome.EQUIVALENT:
                return (
                    f"{self.treatment} and {self.control} are equivalent in {subject} within the planned "
                    f"margin of ±{number(self.margin)} {self.unit} ({evidence})."
                )
            case Outcome.CANNOT_REJECT:
                return (
                    f"On {subject}, {arms}, this design cannot reject: even with all informative pairs on "
                    f"one side, {probability(self.attainable)} would exceed {self.alpha:g} ({evidence})."
                )
            case _:
                why, reach = f": {self.doubt}" if self.doubt else "", ""
                if (detectable := self.estimate.detectable(self.level)) is not None:
                    what = f"difference of about {number(detectable)} {self.unit}"
                    if self.unit == LOG_RATIO:
                        what = f"ratio of about {number(math.exp(detectable))}"
                    reach = f" A design like this detects a {what} with 80% power."
                return f"On {subject}, {arms}, the result is inconclusive{why} ({evidence}).{reach}"

    @property
    def by_ranks(self) -> bool:
        """Whether differences are those of ranks, as a run diverged."""
        return self.unit == RANKS

    @property
    def over_blocks(self) -> bool:
        """Whether the claim is about blocks like these, and not only about these."""
        return isinstance(self.test, TTest) and self.test.blocks > 0

    def _counts(self) -> str:
        n = count(self.replicates, self.claim.unit_of_n)
        over = f"{count(self.blocks, 'block')} of {n} in all"
        n = over if self.over_blocks else f"{n} {these_blocks(self.blocks)}"
        return "; ".join(filter(None, (f"n\u00a0=\u00a0{n.strip()}", self.note)))

    def _not_tested(self) -> str:
        subject = self.claim.subject[0].upper() + self.claim.subject[1:]
        subject += f", {self.treatment} against {self.control},"
        if math.isnan(self.estimate.value):
            return f"{subject} is not compared: {self.untested}."
        return f"{subject} {self._difference()}; {self._counts()}; not tested, because {self.untested}."

    def _difference(self) -> str:
        if self.unit == LOG_RATIO:
            return f"ratio {number(math.exp(self.estimate.value))}, {ratio_text(self.interval)}"
        if self.share is not None:
            return (
                f"{share_text(self.share)} of the frontier, {count(self.share.discordant, 'discordant pair')}"
            )
        return f"difference {signed(self.estimate.value)} {self.unit}, {interval_text(self.interval)}"
