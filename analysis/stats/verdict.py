"""`Verdict`: the only thing the report's sentences are made from.

An outcome is computed from the evidence and cannot be set, and every sentence carries the estimate, its
unit and interval, the p-value after correction and the number of replicates. "Better" and "worse" are words
of `Decision` alone, which needs the two primary outcomes.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

from analysis.stats.frontier import Share
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.sequential import Evidence
from analysis.stats.swaps import SwapTest
from analysis.stats.text import (
    count,
    evidence_text,
    interval_text,
    number,
    probability,
    ratio_text,
    share_text,
    signed,
)

# The unit of an estimate that is read as a ratio.
LOG_RATIO = "log ratio"


class Outcome(Enum):
    """What a comparison may conclude."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    CANNOT_REJECT = "cannot reject at this design"

    @property
    def key(self) -> str:
        """Its name in `results.json`."""
        return self.name.lower()


@dataclass(frozen=True)
class Claim:
    """What one test is about, in the words its verdicts may use.

    Attributes:
        key: Short name, such as "objective".
        subject: The quantity compared, treatment minus control.
        favourable: The treatment "has ..." if the test rejects in its favour.
        unfavourable: The same against it.
        caveat: A sentence every conclusion from this claim ends with, or "".
        primary: Whether the claim may support "better" or "worse".
        higher_is_better: Whether a positive estimate favours the treatment.
        bounds: Values the estimate can take at all; intervals are cut to them.
        unit_of_n: What n counts.
    """

    key: str
    subject: str
    favourable: str
    unfavourable: str
    caveat: str = ""
    primary: bool = False
    higher_is_better: bool = True
    bounds: tuple[float, float] = (-math.inf, math.inf)
    unit_of_n: str = "replicate"


@dataclass(frozen=True)
class Verdict:
    """One claim about a treatment and a control, with its evidence.

    Attributes:
        claim: What is claimed.
        treatment: Estimator under study.
        control: Estimator it is compared with.
        estimate: The difference (or log ratio) with its standard error.
        unit: Unit of the estimate.
        test: The exact test of no difference.
        adjusted: Its p-value corrected for the family it belongs to.
        attainable: The smallest corrected p-value the design allows.
        replicates: n; of a sweep never prompts, steps or batches.
        alpha: Level of the family.
        margin: Equivalence margin fixed in the plan, in `unit`, or None: then equivalence is never claimed.
        share: For a claim on frontier shares: the counts, shown in place of the difference.
        doubt: Why nothing may be concluded whatever the test says, or "".
    """

    claim: Claim
    treatment: str
    control: str
    estimate: Estimate
    unit: str
    test: SwapTest
    adjusted: float
    attainable: float
    replicates: int
    alpha: float = 0.05
    margin: float | None = None
    share: Share | None = None
    doubt: str = ""

    @property
    def outcome(self) -> Outcome:
        """The conclusion the evidence allows."""
        if self.doubt:
            return Outcome.INCONCLUSIVE
        if self.adjusted <= self.alpha and self.estimate.value != 0 and not math.isnan(self.estimate.value):
            favours = (self.estimate.value > 0) == self.claim.higher_is_better
            return Outcome.BETTER if favours else Outcome.WORSE
        if self.margin is not None and self.estimate.equivalence_p(self.margin) <= self.alpha:
            return Outcome.EQUIVALENT
        return Outcome.CANNOT_REJECT if self.attainable > self.alpha else Outcome.INCONCLUSIVE

    @property
    def interval(self) -> Interval | None:
        """The 95% interval shown beside the estimate."""
        if self.share is not None:
            return self.share.interval
        interval, (low, high) = self.estimate.interval(), self.claim.bounds
        return interval and replace(interval, low=max(low, interval.low), high=min(high, interval.high))

    @property
    def label(self) -> str:
        """The outcome in this claim's own words, for a table cell."""
        if self.doubt:
            return f"{self.outcome.value}: {self.doubt}"
        return {Outcome.BETTER: self.claim.favourable, Outcome.WORSE: self.claim.unfavourable}.get(
            self.outcome, self.outcome.value
        )

    @property
    def sentence(self) -> str:
        """The whole finding as one or two sentences."""
        evidence = f"{self._difference()}; {evidence_text(self.test, self.alpha)}"
        if self.adjusted != self.test.p_value:
            evidence += f", {probability(self.adjusted)} after Holm's correction"
        evidence += f"; n\u00a0=\u00a0{count(self.replicates, self.claim.unit_of_n)}"
        subject = self.claim.subject
        match self.outcome:
            case Outcome.BETTER | Outcome.WORSE:
                text = f"{self.treatment} has {self.label} than {self.control} ({evidence})."
                return f"{text} {self.claim.caveat}".strip()
            case Outcome.EQUIVALENT:
                return (
                    f"{self.treatment} and {self.control} are equivalent in {subject} within the planned "
                    f"margin of ±{number(self.margin)} {self.unit} ({evidence})."
                )
            case Outcome.CANNOT_REJECT:
                return (
                    f"On {subject} this design cannot reject: with all informative pairs on one side "
                    f"{probability(self.attainable)} would still exceed {self.alpha:g} ({evidence})."
                )
            case _:
                detectable = self.estimate.detectable(self.alpha)
                reach = (
                    ""
                    if detectable is None
                    else (
                        f" The smallest difference a design like this finds in 80% of cases is about "
                        f"{self._size(detectable)}."
                    )
                )
                why = f": {self.doubt}" if self.doubt else ""
                return f"On {subject} the result is inconclusive{why} ({evidence}).{reach}"

    def _size(self, difference: float) -> str:
        if self.unit == LOG_RATIO:
            return f"a ratio of {number(math.exp(difference))}"
        return f"{number(difference)} {self.unit}"

    def _difference(self) -> str:
        if self.unit == LOG_RATIO:
            return f"ratio {number(math.exp(self.estimate.value))}, {ratio_text(self.interval)}"
        if self.share is not None:
            return (
                f"{share_text(self.share)} of the frontier, {count(self.share.discordant, 'discordant pair')}"
            )
        return f"difference {signed(self.estimate.value)} {self.unit}, {interval_text(self.interval)}"


@dataclass(frozen=True)
class Decision:
    """Better or worse: what the primary outcomes allow, or the e-process where the design was not fixed.

    Attributes:
        objective: The verdict on J.
        matched: The verdict on the reward at matched KL.
        evidence: The e-process of J, if it decides in place of the two.
        not_fixed: Why it does, as the end of a sentence: "the design is sequential".

    Raises:
        ValueError: If a verdict is not about a primary claim.
    """

    objective: Verdict
    matched: Verdict
    evidence: Evidence | None = None
    not_fixed: str = ""

    def __post_init__(self) -> None:
        for verdict in (self.objective, self.matched):
            if not verdict.claim.primary:
                raise ValueError(f"{verdict.claim.key} cannot decide: only primary outcomes can")

    @property
    def outcome(self) -> Outcome:
        """Better if a primary outcome says so and the other does not contradict it."""
        if self.evidence is not None:
            if self.evidence.crossing is None:
                return Outcome.INCONCLUSIVE
            return Outcome.BETTER if self.evidence.favours_treatment else Outcome.WORSE
        found = {self.objective.outcome, self.matched.outcome}
        if {Outcome.BETTER, Outcome.WORSE} <= found:
            return Outcome.INCONCLUSIVE
        for outcome in (Outcome.BETTER, Outcome.WORSE):
            if outcome in found:
                return outcome
        return found.pop() if len(found) == 1 else Outcome.INCONCLUSIVE

    @property
    def headline(self) -> str:
        """The conclusion in one short sentence."""
        treatment, control = self.objective.treatment, self.objective.control
        if self.evidence is not None:
            return self._by_evidence(self.evidence)
        match self.outcome:
            case Outcome.BETTER | Outcome.WORSE:
                return f"{treatment} is {self.outcome.value} than {control} on the primary outcomes."
            case Outcome.EQUIVALENT:
                return f"{treatment} and {control} are equivalent within the planned margins."
            case Outcome.CANNOT_REJECT:
                return f"This design cannot tell {treatment} from {control}, whatever the runs show."
        if {self.objective.outcome, self.matched.outcome} == {Outcome.BETTER, Outcome.WORSE}:
            return f"The two primary outcomes contradict each other on {treatment} against {control}."
        return f"Inconclusive: these runs do not show whether {treatment} is better or worse than {control}."

    @property
    def decided_by(self) -> str:
        """What the conclusion rests on, for `results.json`."""
        return "swap_test" if self.evidence is None else "e_process"

    def _by_evidence(self, evidence: Evidence) -> str:
        treatment, control = self.objective.treatment, self.objective.control
        how = f"decided by the e-process of J, because {self.not_fixed}"
        if evidence.crossing is None:
            last = number(float(evidence.values[-1])) if len(evidence.values) else "1"
            return (
                f"Inconclusive on {treatment} against {control}: E = {last}, and "
                f"{number(evidence.threshold)} is needed ({how})."
            )
        return (
            f"{treatment} is {self.outcome.value} than {control}: E reached {number(evidence.threshold)} at "
            f"{evidence.unit} {evidence.crossing} ({how})."
        )
