"""All tests of each treatment against the control, corrected for multiplicity, as verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.stats.correction import corrected
from analysis.stats.decision import Decision
from analysis.stats.matched_kl import MatchedKL
from analysis.stats.pairs import Curves, Pairs
from analysis.stats.primary import gated_verdicts, primary_verdicts
from analysis.stats.rules import Rules
from analysis.stats.secondary import Spread, secondary_count, secondary_verdicts, spreads_of
from analysis.stats.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Comparison:
    """One treatment against the control.

    Attributes:
        pairs: The matched pairs.
        decision: The conclusion from the primary outcome, corrected over all comparisons.
        matched: The verdict on the reward at matched KL, tested only if the primary test rejects.
        fit: The model of the reward at matched KL; None if the plan decides by the KL.
        secondary: All other tests; one family over all comparisons.
        spreads: The tests of spread between replicates, which include curves.
    """

    pairs: Pairs
    decision: Decision
    matched: Verdict
    fit: MatchedKL | None
    secondary: tuple[Verdict, ...]
    spreads: tuple[Spread, ...] = ()

    def of(self, key: str) -> Verdict | None:
        """The secondary verdict on a claim; None if there is none."""
        return next((verdict for verdict in self.secondary if verdict.claim.key == key), None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All verdicts, beginning with the primary one."""
        return (self.decision.primary, self.matched, *self.secondary)


def compare(
    designs: Sequence[Pairs], rules: Rules, curves: Sequence[Sequence[Curves]] | None = None
) -> tuple[Comparison, ...]:
    """Test each treatment against the control it is paired with.

    There are three families of tests, each at level `rules.alpha`: the primary outcome of all planned
    comparisons; the reward at matched KL, tested only where the primary outcome rejects; all other tests. The
    size of a family is that in the plan and includes tests that could not be run.

    Args:
        designs: Matched pairs of each treatment.
        rules: The rules of the plan.
        curves: Training curves of each treatment's pairs, if available.

    Returns:
        One comparison per design.
    """
    curves = [()] * len(designs) if curves is None else curves
    primary = primary_verdicts(designs, rules)
    gated = gated_verdicts(designs, primary, rules)
    spreads = list(map(spreads_of, curves))
    tests = [secondary_verdicts(pairs, mine, rules) for pairs, mine in zip(designs, spreads, strict=True)]
    secondary = iter(
        corrected(
            [one for mine in tests for one in mine],
            rules.alpha,
            planned=max(rules.comparisons, len(designs)) * secondary_count(rules),
            withheld=rules.withheld,
        )
    )
    return tuple(
        Comparison(
            pairs,
            Decision(verdict),
            matched,
            fit,
            tuple(next(secondary) for _ in mine),
            tuple(drawn),
        )
        for pairs, verdict, (matched, fit), mine, drawn in zip(
            designs, primary, gated, tests, spreads, strict=True
        )
    )
