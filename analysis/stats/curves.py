"""Curves of matched pairs at their common steps."""

from dataclasses import dataclass

from analysis.stats.pairs import FloatArray, Pairs


@dataclass(frozen=True, eq=False)
class Curves:
    """One metric of matched pairs over training.

    Attributes:
        metric: "reward", "kl", or "objective".
        pairs: The pairs in which both runs have the curve and neither diverged.
        steps: The steps that all curves have, ascending, shape [T].
        values: The metric of treatment and control, shape [P, 2, T]; the *log* of the KL where the spread
            between replicates is compared.
    """

    metric: str
    pairs: Pairs
    steps: FloatArray
    values: FloatArray
