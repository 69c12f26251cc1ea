"""`Decision`: the conclusion from the primary outcome."""

from dataclasses import dataclass

from analysis.stats.text import number
from analysis.stats.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Decision:
    """The conclusion from the primary outcome.

    Attributes:
        primary: The verdict on J, or on the KL if the plan decides by the KL.

    Raises:
        ValueError: If the verdict is not about a primary claim.
    """

    primary: Verdict

    def __post_init__(self) -> None:
        if not self.primary.claim.primary:
            raise ValueError(f"{self.primary.claim.key} cannot decide: only a primary outcome can")

    @property
    def outcome(self) -> Outcome:
        """The conclusion."""
        return self.primary.outcome

    @property
    def headline(self) -> str:
        """The conclusion in one short sentence that names the primary outcome."""
        verdict = self.primary
        treatment, control, subject = verdict.treatment, verdict.control, verdict.claim.subject
        where = verdict.condition and f" {verdict.condition}"
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
        return "block_test" if self.primary.over_blocks else "swap_test"
