"""Secondary tests, which are descriptive: one family over all comparisons."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from analysis.stats import claims, frontier
from analysis.stats.claims import Claim
from analysis.stats.contrast import Contrast
from analysis.stats.hypervolume import Reference, hypervolume_differences
from analysis.stats.intervals import Estimate
from analysis.stats.inversion import mean_swap_test
from analysis.stats.kl_reward import LOG_RATIO, log_kl_contrast, reward_contrast
from analysis.stats.pairs import Curves, FloatArray, Pairs
from analysis.stats.rules import Rules
from analysis.stats.stability import SpreadTest, roughness_contributions, spread_test
from analysis.stats.swaps import swap_test
from analysis.stats.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Spread:
    """Curves and the test of their spread between replicates."""

    curves: Curves
    test: SpreadTest


def spreads_of(curves: Sequence[Curves]) -> list[Spread]:
    """The spread of each metric."""
    return [Spread(one, spread_test(one.values, one.pairs.beta_index, one.pairs.unit)) for one in curves]


def secondary_verdicts(pairs: Pairs, spreads: Sequence[Spread], rules: Rules) -> list[Verdict]:
    """The secondary tests of one comparison, not corrected; without those on reward if the KL decides.

    Some need curves, an area or a diverged run; `secondary_count` includes them in any case.
    """
    found = [] if rules.outcome == "kl" else [test(pairs) for test in _frontier_tests(rules)]
    of_curves = [verdict for spread in spreads for verdict in _stability(spread)]
    return [verdict for verdict in (*found, *of_curves, _collapses(pairs)) if verdict is not None]


def secondary_count(rules: Rules) -> int:
    """Number of secondary tests of one comparison, including those that cannot be run."""
    each = len(claims.of_curves("", ""))
    return each + 1 if rules.outcome == "kl" else len(_frontier_tests(rules)) + 2 * each + 1


def _frontier_tests(rules: Rules) -> list[Callable[[Pairs], Verdict | None]]:
    """The tests of KL and reward, the two terms of J, and of what dominates what."""
    return [
        lambda pairs: Verdict.on(claims.KL, pairs, log_kl_contrast(pairs)),
        lambda pairs: Verdict.on(claims.REWARD, pairs, reward_contrast(pairs)),
        partial(share_verdict, claims.FRONTIER_SHARE),
        _replicate_share,
        partial(_dominance, claims.NET_DOMINANCE, frontier.net_dominance_contributions),
        partial(_dominance, claims.MATCHED_DOMINANCE, frontier.matched_dominance_contributions),
        partial(_hypervolume, rules.corner),
    ]


def share_verdict(claim: Claim, pairs: Pairs, cut: float = np.inf) -> Verdict:
    """The share of the frontier of both arms with a KL below `cut`, in nats; not corrected."""
    share = frontier.pooled_share(pairs, cut)
    test = swap_test(frontier.share_contributions(pairs, cut), pairs.unit)
    points = Estimate(2.0 * share.count - share.total)
    return replace(Verdict.about(claim, pairs, points, "points", test), share=share)


def _replicate_share(pairs: Pairs) -> Verdict:
    values = frontier.replicate_share_contributions(pairs)
    betas = len(pairs) / max(1, pairs.replicates)  # shares of a replicate add up over its pairs
    contrast = Contrast(values * betas, np.ones(len(pairs)), "of the share", ranked=True)
    return Verdict.on(claims.REPLICATE_SHARE, pairs, contrast)


def _dominance(claim: Claim, contributions: Callable[[Pairs], FloatArray], pairs: Pairs) -> Verdict:
    contrast = Contrast(contributions(pairs), np.ones(len(pairs)), "net probability", ranked=True)
    return Verdict.on(claim, pairs, contrast)


def _hypervolume(corner: Reference | None, pairs: Pairs) -> Verdict | None:
    if corner is None:
        return None
    differences = hypervolume_differences(pairs, corner)
    mean, test = Estimate.of_mean(differences), mean_swap_test(differences)
    return Verdict.about(claims.HYPERVOLUME, pairs, mean, "nats of log KL × reward", test)


def _stability(spread: Spread) -> Iterator[Verdict]:
    curves, test = spread.curves, spread.test
    largest = float(test.curve[np.abs(test.curve).argmax()]) if len(test.curve) else 0.0
    rough = roughness_contributions(curves.values, curves.pairs.beta_index)
    tests = (
        (Estimate(test.ratio), test.integrated),
        (Estimate(largest), test.pointwise),
        (Estimate.of_mean(rough), mean_swap_test(rough, units=curves.pairs.unit)),
    )
    words = claims.of_curves(curves.metric, "log KL" if curves.metric == "kl" else "the reward")
    for claim, (estimate, swap) in zip(words, tests, strict=True):
        yield Verdict.about(claim, curves.pairs, estimate, LOG_RATIO, swap)


def _collapses(pairs: Pairs) -> Verdict | None:
    """Pairs in which only one run diverged. The swap test of equal contributions is McNemar's exact test."""
    ours, theirs = pairs.diverged.T
    if not (ours != theirs).any():
        return None
    steps = ours.astype(np.float64) - theirs
    test = swap_test(steps, pairs.unit)
    return Verdict.about(claims.COLLAPSES, pairs, Estimate(float(steps.sum())), "runs", test)
