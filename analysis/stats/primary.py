"""The primary outcome, and the reward at matched KL, which is tested only if the primary test rejects."""

import math
from collections.abc import Sequence
from dataclasses import replace

from analysis.stats.claims import KL_DECIDES, MATCHED_KL, OBJECTIVE
from analysis.stats.contrast import Contrast
from analysis.stats.holm import NO_TEST, corrected
from analysis.stats.intervals import Estimate
from analysis.stats.kl_reward import kl_contrast
from analysis.stats.matched_kl import MatchedKL, matched_kl, matched_kl_test
from analysis.stats.objective import objective_contrast
from analysis.stats.pairs import Pairs
from analysis.stats.rules import Rules
from analysis.stats.text import fixed
from analysis.stats.tuning import regret_variance
from analysis.stats.verdict import Outcome, Verdict


def primary_verdicts(designs: Sequence[Pairs], rules: Rules) -> list[Verdict]:
    """The verdict on the primary outcome of each design, with Holm's correction over planned comparisons."""
    findings = [_primary(pairs, rules) for pairs in designs]
    verdicts = corrected(findings, rules.alpha, planned=rules.comparisons, withheld=rules.withheld)
    return [replace(verdict, doubt=_rate_doubt(verdict, rules)) for verdict in verdicts]


def primary_contrast(pairs: Pairs, outcome: str) -> Contrast:
    """The differences in what decides, "objective" or "kl"."""
    return kl_contrast(pairs) if outcome == "kl" else objective_contrast(pairs)


def _rate_doubt(verdict: Verdict, rules: Rules) -> str:
    """Why a difference at the chosen rates may not be one of the arms at their best rates, or ""."""
    if verdict.treatment not in rules.regrets or verdict.adjusted > verdict.alpha:
        return ""
    interval = verdict.interval
    if interval is None or interval.low <= 0 <= interval.high:
        return "the arms differ at the chosen rates, but the choice of rates could explain the difference"
    return ""


def _primary(pairs: Pairs, rules: Rules) -> Verdict:
    claim = KL_DECIDES if rules.outcome == "kl" else OBJECTIVE
    contrast = primary_contrast(pairs, rules.outcome)
    found = Verdict.on(claim, pairs, contrast)
    if contrast.ranked:
        return found
    found = replace(found, margin=rules.margins.get(claim.key))
    if pairs.treatment not in rules.regrets:
        return found
    variance = regret_variance(rules.regrets, pairs.treatment, pairs.control)
    return replace(
        found, estimate=found.estimate.widened(variance), note="the interval includes the choice of rates"
    )


def gated_verdicts(
    designs: Sequence[Pairs], primary: Sequence[Verdict], rules: Rules
) -> list[tuple[Verdict, MatchedKL | None]]:
    """The verdict on the reward at matched KL, and the fitted model, of each design.

    These tests are a separate family with Holm's correction over the planned comparisons. Each is done only
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
    test = NO_TEST if closed else matched_kl_test(pairs)
    return replace(
        Verdict.about(MATCHED_KL, pairs, fit.estimate, unit, test),
        margin=rules.margins.get(MATCHED_KL.key),
        untested=closed,
        note=f"overlap of the KLs {fixed(fit.overlap, 2)}",
    )
