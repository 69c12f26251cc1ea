"""All tests of a treatment against its control, corrected for multiplicity, as verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.stats import frontier
from analysis.stats.contrast import Contrast
from analysis.stats.holm import Finding, corrected
from analysis.stats.intervals import Estimate, clustered_mean, stratified_mean
from analysis.stats.matched_kl import matched_kl_contrast
from analysis.stats.objective import objective_contrast
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.swaps import SwapTest, swap_test
from analysis.stats.verdict import Claim, Decision, Verdict

OBJECTIVE = Claim(
    "objective", "J = reward − β·KL", "higher J = reward − β·KL", "lower J = reward − β·KL", primary=True
)
MATCHED_KL = Claim(
    "matched_kl",
    "reward at matched KL",
    "more reward at matched KL",
    "less reward at matched KL",
    primary=True,
)
_SHARE_CAVEAT = (
    "A larger share also comes from a larger spread between runs; it does not make an estimator better."
)
POOLED_SHARE = Claim(
    "T1", "the share of the frontier", "more frontier points", "fewer frontier points", caveat=_SHARE_CAVEAT
)
REPLICATE_SHARE = Claim(
    "T2",
    "the share of each replicate's frontier",
    "more frontier points within replicates",
    "fewer frontier points within replicates",
    bounds=(-1, 1),
)
NET_DOMINANCE = Claim(
    "T3",
    "net dominance over all pairs of replicates",
    "more net dominance",
    "less net dominance",
    bounds=(-1, 1),
)
MATCHED_DOMINANCE = Claim(
    "T6",
    "dominance within matched pairs",
    "more dominant runs within matched pairs",
    "fewer dominant runs within matched pairs",
    bounds=(-1, 1),
)


@dataclass(frozen=True)
class Rules:
    """What was fixed before any result was seen.

    Attributes:
        alpha: Two-sided level of each family of tests.
        margins: Claim key -> equivalence margin in reward units; without one there is no equivalence.
        cuts: KL cuts for the pooled frontier share, each a test of its own.
    """

    alpha: float = 0.05
    margins: dict[str, float] = field(default_factory=dict)
    cuts: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Comparison:
    """One treatment against the control.

    Attributes:
        pairs: The matched pairs behind it.
        decision: What the two primary outcomes allow, Holm-corrected over all comparisons.
        secondary: T1, T2, T3, T6, and T1 below each KL cut; Holm-corrected as a family of their own.
    """

    pairs: Pairs
    decision: Decision
    secondary: tuple[Verdict, ...]

    @property
    def share(self) -> Verdict:
        """The verdict on the pooled frontier share (T1), which holds its counts."""
        return self.secondary[0]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every verdict, primary ones first."""
        return (self.decision.objective, self.decision.matched, *self.secondary)


def mean_of(contrast: Contrast, pairs: Pairs) -> Estimate:
    """The weighted mean of a contrast, with the standard error its design allows."""
    if pairs.blocked:
        return clustered_mean(contrast.values, contrast.weights, pairs.replicate)
    return stratified_mean(contrast.values, contrast.weights, pairs.beta_index)


def compare(designs: Sequence[Pairs], rules: Rules) -> tuple[Comparison, ...]:
    """Test each treatment against the control it is paired with.

    Args:
        designs: Matched pairs of each treatment.
        rules: Level, margins and cuts fixed in advance.

    Returns:
        One comparison for each design. The primary outcomes of all of them form one Holm family, the
        secondary tests another.
    """
    primary = corrected([f for pairs in designs for f in _primary(pairs, rules)], rules.alpha)
    secondary = corrected([f for pairs in designs for f in _secondary(pairs, rules)], rules.alpha)
    per_design = len(secondary) // max(1, len(designs))
    return tuple(
        Comparison(
            pairs,
            Decision(primary[2 * i], primary[2 * i + 1]),
            tuple(secondary[per_design * i : per_design * (i + 1)]),
        )
        for i, pairs in enumerate(designs)
    )


def _primary(pairs: Pairs, rules: Rules) -> list[Finding]:
    findings = []
    for claim, contrast in ((OBJECTIVE, objective_contrast(pairs)), (MATCHED_KL, matched_kl_contrast(pairs))):
        test = swap_test(contrast.contributions, pairs.unit)
        margin = None if contrast.ranked else rules.margins.get(claim.key)
        estimate = mean_of(contrast, pairs)
        findings.append(finding_of(claim, pairs, estimate, contrast.unit, test, margin=margin))
    return findings


def finding_of(
    claim: Claim, pairs: Pairs, estimate: Estimate, unit: str, test: SwapTest, **more: Any
) -> Finding:
    """A finding about the two estimators of matched pairs."""
    return Finding(claim, pairs.treatment, pairs.control, estimate, unit, test, pairs.replicates, **more)


def _secondary(pairs: Pairs, rules: Rules) -> list[Finding]:
    def share(claim: Claim, cut: float = np.inf) -> Finding:
        counts = frontier.pooled_share(pairs, cut)
        test = swap_test(frontier.share_contributions(pairs, cut), pairs.unit)
        difference = Estimate(2.0 * counts.count - counts.total)
        return finding_of(claim, pairs, difference, "points", test, share=counts)

    def mean(claim: Claim, values: FloatArray, unit: str, scale: float = 1.0) -> Finding:
        contrast = Contrast(values * scale, np.ones(len(pairs)), unit, ranked=False)
        return finding_of(claim, pairs, mean_of(contrast, pairs), unit, swap_test(values, pairs.unit))

    betas = len(pairs) / max(1, pairs.replicates)  # contributions to T2 add up within a replicate
    return [
        share(POOLED_SHARE),
        *(share(_cut_claim(cut), cut) for cut in rules.cuts),
        mean(REPLICATE_SHARE, frontier.replicate_share_contributions(pairs), "of the share", betas),
        mean(NET_DOMINANCE, frontier.net_dominance_contributions(pairs), "net probability"),
        mean(MATCHED_DOMINANCE, frontier.matched_dominance_contributions(pairs), "net probability"),
    ]


def _cut_claim(cut: float) -> Claim:
    below = f"below KL = {cut:g}"
    return Claim(
        f"T1 {below}",
        f"{POOLED_SHARE.subject} {below}",
        f"{POOLED_SHARE.favourable} {below}",
        f"{POOLED_SHARE.unfavourable} {below}",
        caveat=_SHARE_CAVEAT,
    )
