"""The rules of the analysis, the primary outcome, and the reward at matched KL if the primary test rejects.

Each of m tests of a family is done at level alpha / m (Bonferroni), and so is its interval: a corrected
p-value is at most alpha if and only if the interval excludes 0. A step-down correction such as Holm's rejects
more, but its p-values have no intervals that agree with them.

The runs of the grid compare arms at the rates that were chosen for them. At another rate an arm may be
better; what it loses is its regret. The regrets are not known, but the runs of the tuning stage show how
large they may be. Their mean square is added to the variance of a difference between arms, so that its
interval is for the arms at their true best rates. At the smallest or largest rate tried, nothing shows where
the optimum is: there the comparison is one at that rate. `python -m benchmarks certificates` has coverage,
width and power.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.design.rates import edge_of, trial_outcomes
from analysis.results.sweep import Sweep
from analysis.stats.claims import KL_DECIDES, MATCHED_KL, OBJECTIVE
from analysis.stats.contrast import Contrast, TTest, kl_contrast, mean_of, objective_contrast
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import MatchedKL, matched_kl
from analysis.stats.pairs import BoolArray, FloatArray, IntArray, Pairs
from analysis.stats.swaps import SwapTest
from analysis.stats.text import count, fixed, signed
from analysis.stats.verdict import Outcome, Verdict
from lit_klrb import schema

# Number of bootstrap samples.
SAMPLES = 2_000
# Level of the intervals of an arm's rates, divided by their number, by which a rate is clearly worse.
_LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class Tuned:
    """What the tuning stage shows about the chosen rate of an arm."""

    rate: float
    edge: str  # "smallest" or "largest" if it is that of those tried, or ""
    left_out: tuple[float, ...]  # rates that are clearly worse than the best one, and no part of the curve
    regrets: FloatArray  # bootstrap samples of what the arm loses by its rate; zeros at an edge

    @property
    def loss(self) -> float:
        """The root mean square of what the arm may lose by its rate."""
        return float(np.sqrt((self.regrets**2).mean()))


def tuned_arms(sweep: Sweep, *, ratio: bool = False) -> dict[str, Tuned]:
    """What is known of each arm's rate; empty without a choice.

    All arms share the resampled replicates, as their runs share seeds.

    Args:
        sweep: The sweep.
        ratio: Whether regrets are those of the logarithm of a KL, where it decides, instead of the KL.
    """
    if sweep.plan.tuning is None or not sweep.locked.rates:
        return {}
    rates = sorted(sweep.plan.tuning.rates)
    outcomes = trial_outcomes(sweep.plan, sweep.trials)
    count = sweep.plan.tuning.replicates
    drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
    found = {}
    for arm, rate in sweep.locked.rates.items():
        if rate not in rates or not np.isfinite(outcomes[arm]).any():
            continue
        edge, chosen = edge_of(rates, rate), rates.index(rate)
        logs = sweep.plan.primary.outcome == schema.KL
        values = outcomes[arm]
        if logs:  # negative logarithms of KLs, from negative KLs
            values = -np.log(np.where(values < 0, -values, np.nan))
        kept, best, own = resampled(values, np.log(rates), chosen, drawn)
        lost = np.exp(-own) - np.exp(-best) if logs and not ratio else best - own
        usable = np.isfinite(outcomes[arm]).all(axis=0)
        left_out = tuple(rates[index] for index in np.flatnonzero(usable & ~kept))
        found[arm] = Tuned(rate, edge, left_out, np.zeros_like(lost) if edge else np.maximum(0.0, lost))
    return found


def resampled(
    outcomes: FloatArray, log_rates: FloatArray, chosen: int, drawn: IntArray
) -> tuple[BoolArray, FloatArray, FloatArray]:
    """Which rates are on the curve, and samples of the outcome at the best rate, and at the chosen one.

    Each sample resamples replicates, and chooses a rate again. The best outcome is that of a parabola in the
    log rate through the means at the best rate and its two neighbours: an arm's outcome is a parabola only
    near its optimum, as it falls steeply where runs begin to collapse. A rate whose interval lies below that
    of the best one, both simultaneous over the rates, is therefore left out, unless it is one of the best
    three, which a parabola needs. Deviations from the means are
    scaled by sqrt(n / (n - 1)), as those of resampled values are too small.

    Args:
        outcomes: Outcomes of n replicates at R rates, higher being better, shape [n, R]; rates at which a
            value is not finite are left out.
        log_rates: Logarithms of the rates, ascending, shape [R].
        chosen: Index of the chosen rate.
        drawn: Indices of resampled replicates, shape [samples, n].

    Returns:
        Mask of the rates, shape [R], and the two outcomes, shape [samples] each.

    Example:
        >>> same = np.tile([0.0, 1.0, 0.0], (4, 1))                  # without noise, chosen at the top
        >>> resampled(same, np.arange(3.0), 1, np.zeros((2, 4), dtype=int))[1].tolist()
        [1.0, 1.0]
    """
    kept = _kept(outcomes)
    kept[chosen] = True
    at, values, own = log_rates[kept], outcomes[:, kept], int(kept[:chosen].sum())
    means, count = values.mean(axis=0), len(values)
    sampled = means + (values[drawn].mean(axis=1) - means) * np.sqrt(count / (count - 1))
    return kept, _tops(sampled, at), np.asarray(sampled[:, own])


def _kept(values: FloatArray) -> BoolArray:
    """Mask of the finite rates that are among the best three, or not clearly worse than the best."""
    finite = np.asarray(np.isfinite(values).all(axis=0))
    means = np.where(finite, values.mean(axis=0), -np.inf)
    level = 1 - _LEVEL / max(1, int(finite.sum()))
    ends = [Estimate.of_mean(column).interval(level) for column in values.T]
    best, third = ends[int(means.argmax())], np.sort(means)[-min(3, len(means))]
    near = [best is None or own is None or own.high >= best.low for own in ends]
    return np.asarray(finite & (np.array(near) | (means >= third)))


def regret_variance(arms: Mapping[str, Tuned], treatment: str, control: str) -> float:
    """The mean square of the difference between the regrets of two arms; 0 without tuning."""
    if treatment not in arms or control not in arms:
        return 0.0
    return float(((arms[treatment].regrets - arms[control].regrets) ** 2).mean())


def _tops(sampled: FloatArray, at: FloatArray) -> FloatArray:
    """The largest value of each sample's parabola near its best rate, for means [samples, R]; [samples]."""
    best = sampled.max(axis=1)
    if len(at) < 3:
        return np.asarray(best)
    middle = np.clip(sampled.argmax(axis=1), 1, len(at) - 2)
    (x0, x1, x2), rows = (at[middle + step] for step in (-1, 0, 1)), np.arange(len(sampled))
    y0, y1, y2 = (sampled[rows, middle + step] for step in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    slope = left + bend * (x1 - x0)  # at x1
    step = np.where(bend < 0, -slope / np.where(bend < 0, 2 * bend, 1.0), 0.0)
    step = np.clip(step, x0 - x1, x2 - x1)
    return np.asarray(np.maximum(best, y1 + slope * step + bend * step**2))


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
    subject = "KL" if outcome == schema.KL else "J"
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
