"""What was fixed before any result was seen."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """What was fixed before any result was seen, as the statistics need it.

    Attributes:
        alpha: Two-sided level of each family of tests.
        margins: Claim key -> equivalence margin in the claim's unit; without one there is no equivalence.
        cuts: KL cuts for the pooled frontier share, each a test of its own.
        outcome: "objective" or "kl": what decides.
        comparisons: Number of comparisons in the plan; those that lost all their pairs still count.
        corner: KL and reward that hypervolume is measured from; None where there is no area to measure.
        withheld: Why there is no verdict, or "".
    """

    alpha: float = 0.05
    margins: dict[str, float] = field(default_factory=dict)
    cuts: tuple[float, ...] = ()
    outcome: str = "objective"
    comparisons: int = 0
    corner: tuple[float, float] | None = None
    withheld: str = ""
