"""The rules of the analysis, the primary outcome, and the reward at matched KL if the primary test rejects.

Each of m tests of a family is done at level alpha / m (Bonferroni), and so is its interval: a corrected
p-value is at most alpha if and only if the interval excludes 0. A step-down correction such as Holm's rejects
more, but its p-values have no intervals that agree with them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.stats.claims import KL_DECIDES, MATCHED_KL, OBJECTIVE
from analysis.stats.contrast import Contrast, TTest, kl_contrast, mean_of, objective_contrast
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import MatchedKL, matched_kl
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.swaps import SwapTest
from analysis.stats.text import count, fixed, signed
from analysis.stats.tuning import Tuned, regret_variance
from analysis.stats.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Rules:
    """The rules of the analysis, fixed before any result is seen."""

    alpha: float = 0.05  # two-sided level of each family of tests
    # Equivalence margin by key of the claim, in its unit; without a margin equivalence is never concluded
    margins: dict[str, float] = field(default_factory=dict)
    outcome: str = "objective"  # the primary outcome, "objective" or "kl"
    comparisons: int = 0  # number of comparisons in the plan, including those that lost all their pairs
    # KL and reward of the corner of the hypervolume; None if there is no hypervolume
    corner: tuple[float, float] | None = None
    withheld: str = ""  # why there is no verdict, or ""
    # Arm -> what is known of its chosen rate, where rates were tuned
    tuned: Mapping[str, Tuned] = field(default_factory=dict)


# Stands for a test that was not run.
NO_TEST = SwapTest(math.nan, math.nan, 0, 0, True)


def corrected(
    verdicts: Sequence[Verdict], alpha: float, *, planned: int = 0, withheld: str = ""
) -> list[Verdict]:
    """The verdicts of a family after correction, in the same order.

    Args:
        verdicts: The family.
        alpha: Two-sided level of the family.
        planned: Number of tests in the plan, including those that could not be run.
        withheld: Why there is no verdict, or "".
    """
    size = max(1, len(verdicts), planned)
    return [replace(verdict, alpha=alpha, family=size, withheld=withheld) for verdict in verdicts]


def one_step(p_values: Sequence[float]) -> FloatArray:
    """Corrected p-values of a family of tests; `nan` where there was no test.

    Example:
        >>> one_step([0.01, float("nan"), 0.3]).tolist()
        [0.02, nan, 0.6]
    """
    found = np.array(p_values, dtype=np.float64)
    return np.asarray(np.minimum(1.0, found * (~np.isnan(found)).sum()))


# Why there is no t test over blocks of a design that has one.
_NO_VALUE = (
    "a run diverged and has no value, and ranks do not take the place of the planned t test over blocks"
)


def primary_verdicts(designs: Sequence[Pairs], rules: Rules) -> list[Verdict]:
    """The verdict on the primary outcome of each design, corrected over the planned comparisons."""
    findings = [primary_finding(pairs, rules) for pairs in designs]
    return corrected(findings, rules.alpha, planned=rules.comparisons, withheld=rules.withheld)


def primary_contrast(pairs: Pairs, outcome: str) -> Contrast:
    """The differences in what decides, "objective" or "kl"."""
    return kl_contrast(pairs) if outcome == "kl" else objective_contrast(pairs)


def primary_finding(pairs: Pairs, rules: Rules) -> Verdict:
    """The verdict on the primary outcome of one design, not corrected."""
    claim = KL_DECIDES if rules.outcome == "kl" else OBJECTIVE
    contrast = primary_contrast(pairs, rules.outcome)
    if contrast.ranked:
        found = replace(Verdict.on(claim, pairs, contrast), note=_of_values(pairs, rules.outcome))
        # Whether a run diverged is the same for all swaps, but says something about the blocks
        return replace(found, doubt=_NO_VALUE) if pairs.over_blocks else found
    arms = rules.tuned, pairs.treatment, pairs.control
    found = Verdict.on(claim, pairs, contrast, regret_variance(*arms))
    return replace(found, margin=rules.margins.get(claim.key), note=_of_rates(*arms))


def _of_values(pairs: Pairs, outcome: str) -> str:
    """The mean difference of the pairs that have one, which ranks do not show."""
    finite = pairs.finite
    if not len(finite):
        return "a run diverged in every pair"
    contrast = primary_contrast(finite, outcome)
    mean = f"{signed(mean_of(contrast, finite).value)} {contrast.unit}"
    subject = "KL" if outcome == "kl" else "J"
    return f"mean difference in {subject} {mean} in the {count(len(finite), 'pair')} in which no run diverged"


def _of_rates(tuned: Mapping[str, Tuned], *arms: str) -> str:
    """What the interval says about the rates, or "" without tuning."""
    known = [arm for arm in arms if arm in tuned]
    texts = [f"{arm} at the {tuned[arm].edge} rate tried" for arm in known if tuned[arm].edge]
    if inside := [arm for arm in known if not tuned[arm].edge]:
        texts.append(f"the interval includes the choice of the rate of {' and '.join(inside)}")
    return "; ".join(texts)


def gated_verdicts(
    designs: Sequence[Pairs], primary: Sequence[Verdict], rules: Rules
) -> list[tuple[Verdict, MatchedKL | None]]:
    """The verdict on the reward at matched KL, and the fitted model, of each design.

    These tests are a separate family, corrected over the planned comparisons. Each is done only
    if the primary test rejects: if both null hypotheses hold, an error here requires an error there.
    """
    fits = [None if rules.outcome == "kl" else matched_kl(pairs) for pairs in designs]
    findings = [
        _gated(pairs, verdict, fit, rules) for pairs, verdict, fit in zip(designs, primary, fits, strict=True)
    ]
    verdicts = corrected(findings, rules.alpha, planned=rules.comparisons, withheld=rules.withheld)
    return list(zip(verdicts, fits, strict=True))


def _gated(pairs: Pairs, primary: Verdict, fit: MatchedKL | None, rules: Rules) -> Verdict:
    unit = "reward units"
    if fit is None or fit.refused:
        found = Verdict.about(MATCHED_KL, pairs, Estimate(math.nan), unit, NO_TEST)
        return replace(found, untested="the plan decides by the KL alone" if fit is None else fit.refused)
    closed = "" if primary.outcome in (Outcome.BETTER, Outcome.WORSE) else "the test of J does not reject"
    test = NO_TEST if closed else TTest(fit.estimate.p_value)
    return replace(
        Verdict.about(MATCHED_KL, pairs, fit.estimate, unit, test),
        margin=rules.margins.get(MATCHED_KL.key),
        untested=closed,
        note=f"overlap of the KLs {fixed(fit.overlap, 2)}",
    )
