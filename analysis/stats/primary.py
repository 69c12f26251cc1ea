"""The primary outcome, and the reward at matched KL, which is tested only if the primary test rejects."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from analysis.stats.blocks import TTest
from analysis.stats.claims import KL_DECIDES, MATCHED_KL, OBJECTIVE
from analysis.stats.contrast import Contrast
from analysis.stats.correction import NO_TEST, corrected
from analysis.stats.intervals import Estimate
from analysis.stats.kl_reward import kl_contrast
from analysis.stats.matched_kl import MatchedKL, matched_kl
from analysis.stats.objective import objective_contrast
from analysis.stats.pairs import Pairs
from analysis.stats.rules import Rules
from analysis.stats.text import fixed
from analysis.stats.tuning import Tuned, regret_variance
from analysis.stats.verdict import Outcome, Verdict

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
        found = Verdict.on(claim, pairs, contrast)
        # Whether a run diverged is the same for all swaps, but says something about the blocks
        return replace(found, doubt=_NO_VALUE) if pairs.over_blocks else found
    arms = rules.tuned, pairs.treatment, pairs.control
    found = Verdict.on(claim, pairs, contrast, regret_variance(*arms))
    return replace(found, margin=rules.margins.get(claim.key), note=_of_rates(*arms))


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
