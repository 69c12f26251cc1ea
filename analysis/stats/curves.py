"""Training curves of matched pairs at their common steps."""

from dataclasses import dataclass

from analysis.stats.pairs import FloatArray, Pairs


@dataclass(frozen=True, eq=False)
class Curves:
    """One metric of matched pairs over training.

    Attributes:
        metric: "reward" or "kl".
        pairs: The pairs in which both runs have the curve and neither diverged.
        steps: The steps that all curves have, shape [T].
        values: The reward, or the *log* of the KL, of treatment and control, shape [P, 2, T].
    """

    metric: str
    pairs: Pairs
    steps: FloatArray
    values: FloatArray
