"""`Decision`: the conclusion from the primary outcome."""

from dataclasses import dataclass

from analysis.stats.sequential import EProcess
from analysis.stats.text import number, these_blocks
from analysis.stats.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Decision:
    """The conclusion from the primary outcome: by its test, or by an e-process if the design changed.

    Attributes:
        primary: The verdict on J, or on the KL if the plan decides by the KL.
        evidence: The e-process of that outcome, if it decides instead of the test. Its null hypothesis
            is about signs, so that the mean has to favour the same arm.
        not_fixed: Why the e-process decides, as a clause: "the design is sequential".

    Raises:
        ValueError: If the verdict is not about a primary claim.
    """

    primary: Verdict
    evidence: EProcess | None = None
    not_fixed: str = ""

    def __post_init__(self) -> None:
        if not self.primary.claim.primary:
            raise ValueError(f"{self.primary.claim.key} cannot decide: only a primary outcome can")

    @property
    def outcome(self) -> Outcome:
        """The conclusion."""
        if self.primary.withheld:
            return Outcome.NO_VERDICT
        if self.evidence is None:
            return self.primary.outcome
        if self.evidence.crossing is None or not self.mean_agrees:
            return Outcome.INCONCLUSIVE
        return Outcome.BETTER if self.evidence.favours_treatment else Outcome.WORSE

    @property
    def mean_agrees(self) -> bool:
        """Whether the mean difference favours the same arm as the e-process, which weighs signs.

        An arm that is slightly better in most pairs and much worse in a few wins bets, but its mean is lower.
        """
        value = self.primary.estimate.value
        favours = (value > 0) == self.primary.claim.higher_is_better
        return self.evidence is not None and value != 0 and favours == self.evidence.favours_treatment

    @property
    def headline(self) -> str:
        """The conclusion in one short sentence that names the primary outcome."""
        verdict = self.primary
        treatment, control, subject = verdict.treatment, verdict.control, verdict.claim.subject
        where = verdict.condition and f" {verdict.condition}"
        if self.evidence is not None and not verdict.withheld:
            return self._by_evidence(self.evidence)
        match self.outcome:
            case Outcome.NO_VERDICT:
                return f"No verdict on {treatment} against {control}: {verdict.withheld}."
            case Outcome.BETTER | Outcome.WORSE:
                return f"{treatment} is {self.outcome.value} than {control}: it has {verdict.label}{where}."
            case Outcome.EQUIVALENT:
                margin = f"±{number(verdict.margin)} {verdict.unit}"
                return (
                    f"{treatment} and {control} are equivalent in {subject} within the planned margin, "
                    f"{margin}{where}."
                )
            case Outcome.CANNOT_REJECT:
                return f"This design cannot tell {treatment} from {control}, whatever the runs show."
            case _:
                return (
                    f"Inconclusive: these runs do not show whether {treatment} is better or worse than "
                    f"{control} in {subject}."
                )

    @property
    def decided_by(self) -> str:
        """The kind of evidence behind the conclusion, for `results.json`."""
        own = "block_test" if self.primary.over_blocks else "swap_test"
        return own if self.evidence is None else "e_process"

    def _by_evidence(self, evidence: EProcess) -> str:
        treatment, control = self.primary.treatment, self.primary.control
        how = f"decided by the e-process of {self.primary.claim.subject}, because {self.not_fixed}"
        if self.primary.blocks:  # its null hypothesis is about single pairs
            how += f"; {these_blocks(self.primary.blocks)}"
        if evidence.crossing is None:
            last = number(float(evidence.values[-1])) if len(evidence.values) else "1"
            return (
                f"Inconclusive on {treatment} against {control}: E = {last}, and "
                f"{number(evidence.threshold)} is needed ({how})."
            )
        if not self.mean_agrees:
            ahead, behind = (treatment, control) if evidence.favours_treatment else (control, treatment)
            return (
                f"Inconclusive on {treatment} against {control}: E reached {number(evidence.threshold)} at "
                f"{evidence.unit} {evidence.crossing} for {ahead}, which is ahead more often, but the mean "
                f"favours {behind} ({how})."
            )
        return (
            f"{treatment} is {self.outcome.value} than {control}: E reached {number(evidence.threshold)} at "
            f"{evidence.unit} {evidence.crossing} ({how})."
        )
