"""The rules of the analysis, fixed before any result is seen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from analysis.stats.tuning import Tuned


@dataclass(frozen=True)
class Rules:
    """The rules of the analysis, fixed before any result is seen.

    Attributes:
        alpha: Two-sided level of each family of tests.
        margins: Equivalence margin by key of the claim, in its unit; without a margin equivalence is never
            concluded.
        outcome: The primary outcome, "objective" or "kl".
        comparisons: Number of comparisons in the plan, including those that lost all their pairs.
        corner: KL and reward of the corner of the hypervolume; None if there is no hypervolume.
        withheld: Why there is no verdict, or "".
        tuned: Arm -> what is known of its chosen rate, where rates were tuned.
    """

    alpha: float = 0.05
    margins: dict[str, float] = field(default_factory=dict)
    outcome: str = "objective"
    comparisons: int = 0
    corner: tuple[float, float] | None = None
    withheld: str = ""
    tuned: Mapping[str, Tuned] = field(default_factory=dict)
