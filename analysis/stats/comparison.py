"""All tests of each treatment against the control, corrected for multiplicity, as verdicts.

The stability of training is the spread between replicates along a curve, and the roughness within runs.
Curves are of the reward or of the *log* of the KL: the spread of a KL increases with its level, so that runs
closer to the reference would otherwise appear more stable.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.stats import claims, frontier, swaps
from analysis.stats.contrast import LOG_RATIO, Contrast, difference, log_kl_contrast
from analysis.stats.frontier import Reference
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import MatchedKL
from analysis.stats.pairs import Curves, FloatArray, IntArray, Pairs
from analysis.stats.primary import Rules, corrected, gated_verdicts, primary_verdicts
from analysis.stats.verdict import Verdict


@dataclass(frozen=True, eq=False)
class SpreadTest:
    """Log ratio of the two estimators' spread between replicates, treatment over control."""

    # L_t = log sum |r_treatment| - log sum |r_control|, shape [T]; negative where the treatment has less
    # spread
    curve: FloatArray
    pointwise: swaps.SwapTest  # the swap test of max |L_t|, simultaneous over all steps
    # Log ratio of the spreads over all steps, in each of which the spread of both estimators is 1
    ratio: float
    integrated: swaps.SwapTest  # the swap test of that ratio, with its interval


def spread_test(
    values: FloatArray, beta_index: IntArray, units: IntArray, *, resamples: int = swaps.RESAMPLES
) -> SpreadTest:
    """Compare the spread between replicates at all steps and on average.

    Residuals are deviations from the median of each arm, beta and step, so that the arms' mean curves have no
    effect. Swaps exchange residuals within pairs without recomputing them. With absolute values and medians
    the test keeps its level under heavy tails, which it does not with squares and means.

    Args:
        values: Outcome of each pair's treatment and control at each step, shape [P, 2, T], finite; several
            metrics may be concatenated.
        beta_index: Index of the KL weight of each pair, shape [P].
        units: Pairs with equal entries are swapped together, shape [P].
        resamples: Number of random swaps if enumeration would need more.

    Raises:
        ValueError: If a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("values must be finite: leave out pairs with a diverged run")
    names = np.unique(units)
    sizes = np.abs(_centred(values, beta_index, np.median))
    total = sizes.sum(axis=(0, 1))
    sizes, total = sizes[..., total > 0], total[total > 0]
    leaning = np.stack([(sizes[units == name, 0] - sizes[units == name, 1]).sum(axis=0) for name in names])

    def curve(signs: FloatArray) -> FloatArray:
        floor, more = 1e-12 * total, signs @ leaning  # a side without spread has this little
        return np.asarray(np.log(np.maximum(total + more, floor)) - np.log(np.maximum(total - more, floor)))

    def largest(signs: FloatArray) -> FloatArray:
        return np.asarray(np.abs(curve(signs)).max(axis=-1, initial=0.0))

    observed = curve(np.ones(len(names)))
    ours, theirs = (sizes / total).sum(axis=-1).T
    ratio, integrated = swaps.ratio_swap_test(ours, theirs, units, resamples=resamples)
    return SpreadTest(
        observed, swaps.size_swap_test(len(names), largest, resamples=resamples), ratio, integrated
    )


def roughness_contributions(values: FloatArray, beta_index: IntArray) -> FloatArray:
    """Difference in the log mean squared increment around the mean curve, treatment minus control.

    This is the roughness within runs, as opposed to the spread between runs.

    Args:
        values: Outcome of each pair's treatment and control at each step, shape [P, 2, T].
        beta_index: Index of the KL weight of each pair, shape [P].

    Returns:
        Swap contributions, shape [P]; negative where the treatment's run is smoother.
    """
    squared = (np.diff(_centred(values, beta_index, np.mean), axis=-1) ** 2).mean(axis=-1)
    logs = np.log(np.maximum(squared, np.finfo(float).tiny))
    return np.asarray(logs[:, 0] - logs[:, 1])


def _centred(values: FloatArray, beta_index: IntArray, centre: Callable[..., Any]) -> FloatArray:
    """The values minus the mean or median of their arm, beta and step."""
    found = values.copy()
    for index in np.unique(beta_index):
        found[beta_index == index] -= centre(values[beta_index == index], axis=0)
    return found


def secondary_verdicts(pairs: Pairs, curves: Sequence[Curves], rules: Rules) -> list[Verdict]:
    """The secondary tests of one comparison, not corrected; without those on reward if the KL decides.

    Some need curves, an area or a diverged run; `secondary_count` includes them in any case.
    """
    found = [] if rules.outcome == "kl" else [*_of_frontier(pairs, rules.corner)]
    return [*found, *(verdict for one in curves for verdict in _stability(one)), *_collapses(pairs)]


def secondary_count(rules: Rules) -> int:
    """Number of secondary tests of one comparison, including those that cannot be run."""
    each = len(claims.of_curves("", ""))
    return each + 1 if rules.outcome == "kl" else len(claims.OF_FRONTIER) + 2 * each + 1


def _of_frontier(pairs: Pairs, corner: Reference | None) -> Iterator[Verdict]:
    """The tests of KL and reward, the two terms of J, and of what dominates what."""
    yield Verdict.on(claims.KL, pairs, log_kl_contrast(pairs))
    yield Verdict.on(claims.REWARD, pairs, difference(pairs, pairs.reward, "reward units"))
    yield share_verdict(pairs)
    # Shares of a replicate add up over its pairs
    shares = frontier.replicate_share_contributions(pairs) * len(pairs) / max(1, pairs.replicates)
    for claim, unit, values in (
        (claims.REPLICATE_SHARE, "of the share", shares),
        (claims.NET_DOMINANCE, "net probability", frontier.net_dominance_contributions(pairs)),
        (claims.MATCHED_DOMINANCE, "net probability", frontier.matched_dominance_contributions(pairs)),
    ):
        yield Verdict.on(claim, pairs, Contrast(values, np.ones(len(pairs)), unit, ranked=True))
    if corner is not None:
        volumes = frontier.hypervolume_differences(pairs, corner)
        mean, test = Estimate.of_mean(volumes), swaps.mean_swap_test(volumes)
        yield Verdict.about(claims.HYPERVOLUME, pairs, mean, "nats of log KL × reward", test)


def share_verdict(pairs: Pairs, cut: float = np.inf) -> Verdict:
    """The share of the frontier of both arms with a KL below `cut`, in nats; not corrected."""
    share = frontier.pooled_share(pairs, cut)
    test = swaps.swap_test(frontier.share_contributions(pairs, cut), pairs.unit)
    points = Estimate(2.0 * share.count - share.total)
    return replace(Verdict.about(claims.FRONTIER_SHARE, pairs, points, "points", test), share=share)


def _stability(curves: Curves) -> Iterator[Verdict]:
    test = spread_test(curves.values, curves.pairs.beta_index, curves.pairs.unit)
    largest = float(test.curve[np.abs(test.curve).argmax()]) if len(test.curve) else 0.0
    rough = roughness_contributions(curves.values, curves.pairs.beta_index)
    tests = (
        (Estimate(test.ratio), test.integrated),
        (Estimate(largest), test.pointwise),
        (Estimate.of_mean(rough), swaps.mean_swap_test(rough, units=curves.pairs.unit)),
    )
    words = claims.of_curves(curves.metric, "log KL" if curves.metric == "kl" else "the reward")
    for claim, (estimate, swap) in zip(words, tests, strict=True):
        yield Verdict.about(claim, curves.pairs, estimate, LOG_RATIO, swap)


def _collapses(pairs: Pairs) -> Iterator[Verdict]:
    """Pairs in which only one run diverged. The swap test of equal contributions is McNemar's exact test."""
    steps = pairs.diverged[:, 0].astype(np.float64) - pairs.diverged[:, 1]
    if steps.any():
        test = swaps.swap_test(steps, pairs.unit)
        yield Verdict.about(claims.COLLAPSES, pairs, Estimate(float(steps.sum())), "runs", test)


@dataclass(frozen=True, eq=False)
class Comparison:
    """One treatment against the control."""

    pairs: Pairs
    primary: Verdict  # the verdict on the primary outcome, corrected over all comparisons
    matched: Verdict  # the verdict on the reward at matched KL, tested only if the primary test rejects
    fit: MatchedKL | None  # the model of the reward at matched KL; None if the plan decides by the KL
    secondary: tuple[Verdict, ...]  # all other tests; one family over all comparisons

    def of(self, key: str) -> Verdict | None:
        """The secondary verdict on a claim; None if there is none."""
        return next((verdict for verdict in self.secondary if verdict.claim.key == key), None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All verdicts, beginning with the primary one."""
        return (self.primary, self.matched, *self.secondary)


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
    """
    curves = [()] * len(designs) if curves is None else curves
    primary = primary_verdicts(designs, rules)
    gated = gated_verdicts(designs, primary, rules)
    planned = max(rules.comparisons, len(designs)) * secondary_count(rules)
    found = []
    for pairs, verdict, (matched, fit), mine in zip(designs, primary, gated, curves, strict=True):
        tests = secondary_verdicts(pairs, mine, rules)
        secondary = corrected(tests, rules.alpha, planned=planned, withheld=rules.withheld)
        found.append(Comparison(pairs, verdict, matched, fit, tuple(secondary)))
    return tuple(found)
