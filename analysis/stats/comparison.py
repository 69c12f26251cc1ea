"""The tests of each treatment against the control, corrected for multiplicity, as verdicts.

The primary outcome of all planned comparisons is one family of tests. The KL, the reward and the spread of
runs are another: they describe what moved, and decide nothing. Each of m tests of a family is done at level
alpha / m (Bonferroni), and so is its interval: a corrected p-value is at most alpha if and only if the
interval excludes 0. A step-down correction such as Holm's rejects more, but its p-values have no intervals
that agree with them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.stats import claims
from analysis.stats.contrast import (
    LOG_RATIO,
    Contrast,
    difference,
    equal_betas,
    kl_contrast,
    log_kl_contrast,
    mean_of,
    objective,
    objective_contrast,
)
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import MatchedKL, matched_kl
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.prompts import over_prompts
from analysis.stats.swaps import ratio_swap_test
from analysis.stats.text import count, signed
from analysis.stats.tuning import Tuned, regret_variance
from analysis.stats.verdict import Verdict

# Fewest replicates whose spread is compared: deviations of two values from their median have equal size.
_FEWEST = 3
# Differences below this share of the values are rounding: the arms do the same.
_SAME = 1e-6
_NO_VALUE = "a run diverged and has no value, and ranks do not take the place of the planned t test"


@dataclass(frozen=True)
class Rules:
    """The rules of the analysis, fixed before any result is seen."""

    alpha: float = 0.05  # two-sided level of each family of tests
    # Equivalence margin of the primary outcome, in its unit; without one equivalence is never concluded
    margin: float | None = None
    outcome: str = "objective"  # the primary outcome, "objective" or "kl"
    comparisons: int = 0  # number of comparisons in the plan, including those that lost all their pairs
    withheld: str = ""  # why there is no verdict, or ""
    # Arm -> what is known of its chosen rate, where rates were tuned
    tuned: Mapping[str, Tuned] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Comparison:
    """One treatment against the control."""

    pairs: Pairs
    primary: Verdict  # the verdict on the primary outcome, corrected over all comparisons
    matched: MatchedKL | None  # the reward at matched KL, described; None if the plan decides by the KL
    secondary: tuple[Verdict, ...]  # KL, reward and spread; one family over all comparisons

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All verdicts, beginning with the primary one."""
        return (self.primary, *self.secondary)


def compare(designs: Sequence[Pairs], rules: Rules) -> tuple[Comparison, ...]:
    """Test each treatment against the control it is paired with.

    The size of a family is that in the plan and includes tests that could not be run.
    """
    by_kl = rules.outcome == "kl"
    planned = max(rules.comparisons, len(designs)) * (1 if by_kl else 3)
    comparisons = []
    for pairs, verdict in zip(designs, primary_verdicts(designs, rules), strict=True):
        tests = [*secondary_findings(pairs, rules.outcome)]
        secondary = corrected(tests, rules.alpha, planned=planned, withheld=rules.withheld)
        matched = None if by_kl else matched_kl(pairs)
        comparisons.append(Comparison(pairs, verdict, matched, tuple(secondary)))
    return tuple(comparisons)


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
    return [
        replace(verdict, alpha=alpha, family=size, withheld=withheld or verdict.withheld)
        for verdict in verdicts
    ]


def one_step(p_values: Sequence[float]) -> FloatArray:
    """Corrected p-values of a family of tests; `nan` where there was no test.

    Example:
        >>> one_step([0.01, float("nan"), 0.3]).tolist()
        [0.02, nan, 0.6]
    """
    values = np.array(p_values, dtype=np.float64)
    return np.asarray(np.minimum(1.0, values * (~np.isnan(values)).sum()))


def primary_verdicts(designs: Sequence[Pairs], rules: Rules) -> list[Verdict]:
    """The verdict on the primary outcome of each design, corrected over the planned comparisons."""
    findings = [primary_finding(pairs, rules) for pairs in designs]
    return corrected(findings, rules.alpha, planned=rules.comparisons, withheld=rules.withheld)


def primary_contrast(pairs: Pairs, outcome: str) -> Contrast:
    """The differences in what decides, "objective" or "kl"."""
    return kl_contrast(pairs) if outcome == "kl" else objective_contrast(pairs)


def primary_finding(pairs: Pairs, rules: Rules) -> Verdict:
    """The verdict on the primary outcome of one design, not corrected."""
    claim = claims.KL_DECIDES if rules.outcome == "kl" else claims.OBJECTIVE
    contrast = primary_contrast(pairs, rules.outcome)
    if contrast.ranked:
        verdict = replace(Verdict.on(claim, pairs, contrast), note=_of_values(pairs, rules.outcome))
        # Whether a run diverged is the same for all swaps, but says something about the values
        return replace(verdict, doubt=_NO_VALUE) if pairs.over_blocks or pairs.single else verdict
    arms = rules.tuned, pairs.treatment, pairs.control
    verdict = Verdict.on(claim, pairs, contrast, regret_variance(*arms))
    values = pairs.kl if rules.outcome == "kl" else objective(pairs)
    same = np.abs(contrast.values).max(initial=0.0) <= _SAME * np.abs(values).max(initial=0.0)
    return replace(
        verdict,
        margin=rules.margin,
        note=_of_rates(*arms),
        withheld="the arms do the same: no run differs from the one that it is paired with" if same else "",
        gain=_gain(pairs),
        over_prompts=over_prompts(verdict.estimate, contrast, pairs),
    )


def _gain(pairs: Pairs) -> Estimate | None:
    """What the control gained in training, the mean over betas; None if the start of a run is unknown."""
    if pairs.gain is None or not np.isfinite(pairs.gain).all():
        return None
    return mean_of(Contrast(pairs.gain, equal_betas(pairs), "", ranked=False), pairs)


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


def secondary_findings(pairs: Pairs, outcome: str) -> Iterator[Verdict]:
    """The tests of KL and reward, unless the KL decides, and of the spread of runs; not corrected."""
    if outcome != "kl":
        yield Verdict.on(claims.KL, pairs, log_kl_contrast(pairs))
        yield Verdict.on(claims.REWARD, pairs, difference(pairs, pairs.reward, "reward units"))
    finite = pairs.finite
    if finite.replicates >= _FEWEST:
        yield spread_finding(finite, outcome)


def spread_finding(pairs: Pairs, outcome: str) -> Verdict:
    """The log ratio of both arms' spread between runs in what decides, treatment over control; not corrected.

    The spread is the sum of absolute deviations from the median of each arm and beta. Swaps exchange
    deviations within pairs without computing them again. With absolute values and medians the test keeps its
    level under heavy tails, which it does not with squares and means. Of KLs the logarithm varies: the spread
    of a KL increases with its level, so that runs closer to the reference would appear steadier.
    """
    by_kl = outcome == "kl"
    values = np.log(np.maximum(pairs.kl, np.finfo(float).tiny)) if by_kl else objective(pairs)
    sizes = np.empty_like(values)
    for index in pairs.beta_indices:
        mask = pairs.beta_index == index
        sizes[mask] = np.abs(values[mask] - np.median(values[mask], axis=0))
    ratio, test = ratio_swap_test(sizes[:, 0], sizes[:, 1], pairs.unit)
    claim = claims.spread_of("log KL" if by_kl else "J")
    return Verdict.about(claim, pairs, Estimate(ratio if math.isfinite(ratio) else math.nan), LOG_RATIO, test)
