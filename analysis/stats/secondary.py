"""Secondary tests, which are descriptive: one Holm family over all comparisons."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats import claims, frontier
from analysis.stats.attainment import Reference, hypervolume_test
from analysis.stats.claims import Claim
from analysis.stats.contrast import Contrast, mean_of
from analysis.stats.curves import Curves
from analysis.stats.holm import Finding
from analysis.stats.intervals import Estimate
from analysis.stats.kl_reward import LOG_RATIO, log_kl_contrast, reward_contrast
from analysis.stats.pairs import FloatArray, Pairs
from analysis.stats.rules import Rules
from analysis.stats.stability import SpreadTest, roughness_test, spread_test
from analysis.stats.swaps import SwapTest, swap_test


@dataclass(frozen=True, eq=False)
class Spread:
    """Curves and the test of their spread between replicates."""

    curves: Curves
    test: SpreadTest


def spreads_of(curves: Sequence[Curves], alpha: float, panels: int) -> list[Spread]:
    """The spread of each metric, with a band that is simultaneous over `panels` panels."""
    return [
        Spread(one, spread_test(one.values, one.pairs.beta_index, one.pairs.unit, band_alpha=alpha / panels))
        for one in curves
    ]


def secondary_findings(pairs: Pairs, spreads: Sequence[Spread], rules: Rules) -> list[Finding]:
    """The secondary tests of one comparison; without those on reward if the plan decides by the KL.

    Some need curves, an area or a diverged run; `secondary_count` includes them in any case.
    """
    found = [] if rules.outcome == "kl" else [*_parts(pairs), *_frontier(pairs, rules)]
    for spread in spreads:
        found += _stability(spread)
    return [*found, *_collapses(pairs)]


def secondary_count(rules: Rules) -> int:
    """Number of secondary tests of one comparison, including those that cannot be run."""
    of_curves, others = 3, 1  # tests per metric; the test of diverged runs
    if rules.outcome == "kl":
        return of_curves + others
    return 2 * of_curves + others + len(rules.cuts) + 7


def _parts(pairs: Pairs) -> Iterator[Finding]:
    for claim, contrast in ((claims.KL, log_kl_contrast(pairs)), (claims.REWARD, reward_contrast(pairs))):
        test = swap_test(contrast.contributions, pairs.unit)
        yield Finding.about(claim, pairs, mean_of(contrast, pairs), contrast.unit, test)


def _frontier(pairs: Pairs, rules: Rules) -> Iterator[Finding]:
    def share(claim: Claim, cut: float = np.inf) -> Finding:
        counts = frontier.pooled_share(pairs, cut)
        test = swap_test(frontier.share_contributions(pairs, cut), pairs.unit)
        difference = Estimate(2.0 * counts.count - counts.total)
        return Finding.about(claim, pairs, difference, "points", test, share=counts)

    def mean(claim: Claim, values: FloatArray, unit: str, scale: float = 1.0) -> Finding:
        contrast = Contrast(values * scale, np.ones(len(pairs)), unit, ranked=False)
        return Finding.about(claim, pairs, mean_of(contrast, pairs), unit, swap_test(values, pairs.unit))

    yield share(claims.FRONTIER_SHARE)
    for cut in rules.cuts:
        yield share(claims.share_below(cut), cut)
    betas = len(pairs) / max(1, pairs.replicates)  # shares of a replicate add up over its pairs
    yield mean(claims.REPLICATE_SHARE, frontier.replicate_share_contributions(pairs), "of the share", betas)
    yield mean(claims.NET_DOMINANCE, frontier.net_dominance_contributions(pairs), "net probability")
    yield mean(claims.MATCHED_DOMINANCE, frontier.matched_dominance_contributions(pairs), "net probability")
    if rules.corner is not None:
        yield _hypervolume(pairs, rules.corner)


def _hypervolume(pairs: Pairs, corner: Reference) -> Finding:
    found = hypervolume_test(pairs, corner)
    count = len(found.differences)
    error = float(found.differences.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
    estimate = Estimate(float(found.differences.mean()), error, count - 1.0)
    return Finding.about(claims.HYPERVOLUME, pairs, estimate, "nats of log KL × reward", found.test)


def _stability(spread: Spread) -> Iterator[Finding]:
    curves, test = spread.curves, spread.test
    named = curves.metric, "log KL" if curves.metric == "kl" else "the reward"

    def finding(claim: Claim, estimate: Estimate, swaps: SwapTest) -> Finding:
        return Finding.about(claim, curves.pairs, estimate, LOG_RATIO, swaps)

    # The tests are of control / treatment, the estimates of treatment / control
    mean = Estimate(-test.mean.value, test.mean.standard_error, test.mean.degrees)
    yield finding(claims.spread_of(*named), mean, test.integrated)
    largest = float(test.curve[np.abs(test.curve).argmax()]) if len(test.curve) else 0.0
    yield finding(claims.spread_anywhere(*named), Estimate(-largest), test.pointwise)
    roughness, swaps = roughness_test(curves.values, curves.pairs.beta_index, curves.pairs.unit)
    yield finding(
        claims.roughness_of(*named),
        Estimate(-roughness.value, roughness.standard_error, roughness.degrees),
        swaps,
    )


def _collapses(pairs: Pairs) -> Iterator[Finding]:
    """Pairs in which only one run diverged. The swap test of equal contributions is McNemar's exact test."""
    ours, theirs = pairs.diverged.T
    if (ours != theirs).any():
        steps = ours.astype(np.float64) - theirs
        yield Finding.about(
            claims.COLLAPSES, pairs, Estimate(float(steps.sum())), "runs", swap_test(steps, pairs.unit)
        )
