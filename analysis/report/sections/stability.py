"""Fig. 4b: whether runs of an estimator spread less between replicates, over the whole of training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, looks, sheet
from analysis.stats import Comparison, Pairs, Verdict
from analysis.stats.comparison import finding_of
from analysis.stats.holm import Finding, corrected
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray
from analysis.stats.stability import SpreadTest, collapse_p_value, roughness_test, spread_test
from analysis.stats.text import number, ratio_text
from analysis.stats.verdict import LOG_RATIO, Claim
from lit_klrb import schema

# Two replicates have no spread to compare once their median is taken.
_FEWEST = 3


@dataclass(frozen=True, eq=False)
class _Spread:
    """One metric of matched pairs: its curves [P, 2, T] at the steps [T] they share, and the test."""

    metric: str
    pairs: Pairs
    steps: FloatArray
    values: FloatArray
    test: SpreadTest


def stability(assessment: Assessment) -> Section | None:
    """Spread between replicates over training (D1, D2), roughness within runs (D3), and collapses."""
    spreads = [
        spread
        for comparison in assessment.comparisons
        for metric in (schema.REWARD, schema.KL)
        if (spread := _spread(assessment, comparison.pairs, metric)) is not None
    ]
    if not spreads or assessment.withheld:
        return None
    verdicts = corrected([_finding(spread) for spread in spreads], assessment.sweep.plan.primary.alpha)
    return Section(
        "stability",
        "Stability of training",
        paragraphs=[
            "Spread is the sum over replicates of the distance from their median, at the same step, β and "
            "estimator; of the log of the KL, as a KL spreads more where it is larger. What is compared "
            "is the average over all training steps of the log ratio of spreads. It describes, and decides "
            "nothing.",
            *(verdict.sentence for verdict in verdicts),
        ],
        figures=[_figure(assessment, spreads)],
        tables=[_table(spreads, verdicts), _collapses(assessment.comparisons)],
        numbers={
            f"{spread.pairs.treatment}, {spread.metric}": {
                "log_ratio": verdict.estimate.value,
                "p": verdict.test.p_value,
                "p_holm": verdict.adjusted,
                "p_any_step": spread.test.pointwise.p_value,
                "outcome": verdict.outcome.value,
            }
            for spread, verdict in zip(spreads, verdicts, strict=True)
        },
    )


def _spread(assessment: Assessment, pairs: Pairs, metric: str) -> _Spread | None:
    pairs = pairs.subset(np.asarray(~pairs.diverged.any(axis=1)))
    if pairs.replicates < _FEWEST:
        return None
    grid = assessment.sweep.grid
    curves = [
        [
            grid[name, int(index), int(replicate)].curves.get(f"train/{metric}")
            for name in (pairs.treatment, pairs.control)
        ]
        for index, replicate in zip(pairs.beta_index, pairs.replicate, strict=True)
    ]
    found = [curve for pair in curves for curve in pair if curve is not None and len(curve.step)]
    if len(found) < 2 * len(pairs):
        return None
    steps = found[0].step
    for curve in found:
        steps = np.intersect1d(steps, curve.step)
    values = np.array([curve.value[np.searchsorted(curve.step, steps)] for curve in found])
    values = values.reshape(len(pairs), 2, len(steps))
    allowed = np.isfinite(values).all(axis=(0, 1))
    if metric == schema.KL:
        allowed &= (values > 0).all(axis=(0, 1))
        values = np.log(np.where(allowed, values, 1.0))
    ranges = [np.ptp(values[pairs.beta_index == index], axis=0) for index in pairs.beta_indices]
    allowed &= np.any(ranges, axis=(0, 1))
    values, steps = values[..., allowed], steps[allowed]
    if len(steps) < 2:
        return None
    return _Spread(metric, pairs, steps, values, spread_test(values, pairs.beta_index, pairs.unit))


def _finding(spread: _Spread) -> Finding:
    what = "the reward" if spread.metric == schema.REWARD else "log KL"
    claim = Claim(
        f"D2: {what}",
        f"the spread of {what} between replicates under {spread.pairs.treatment}",
        f"less spread of {what} between replicates",
        f"more spread of {what} between replicates",
        higher_is_better=False,
    )
    mean = spread.test.mean
    estimate = Estimate(-mean.value, mean.standard_error, mean.degrees)
    return finding_of(claim, spread.pairs, estimate, LOG_RATIO, spread.test.integrated)


def _table(spreads: Sequence[_Spread], verdicts: Sequence[Verdict]) -> Table:
    return Table(
        "Spread between replicates over the control's, averaged over training steps (D2), with a 95% "
        "jackknife interval over the units that are swapped; corrected together (Holm). Any step (D1): swap "
        "p-value of the largest ratio at a single step, all steps at once. Roughness (D3) is another claim: "
        "squared increments within runs, over the control's.",
        (
            "Estimator",
            "Of",
            "Ratio",
            "95% CI",
            "p (swap)",
            "p (Holm)",
            "p, any step",
            "Roughness",
            "p",
            "Verdict",
        ),
        [_row(spread, verdict) for spread, verdict in zip(spreads, verdicts, strict=True)],
    )


def _row(spread: _Spread, verdict: Verdict) -> tuple[str, ...]:
    roughness, test = roughness_test(spread.values, spread.pairs.beta_index, spread.pairs.unit)
    return (
        verdict.treatment,
        "reward" if spread.metric == schema.REWARD else "log KL",
        number(float(np.exp(verdict.estimate.value))),
        ratio_text(verdict.interval).partition(" CI ")[2] or "–",
        number(verdict.test.p_value, 2),
        number(verdict.adjusted, 2),
        number(spread.test.pointwise.p_value, 2),
        number(float(np.exp(-roughness.value))),
        number(test.p_value, 2),
        verdict.label,
    )


def _collapses(comparisons: Sequence[Comparison]) -> Table:
    rows = []
    for comparison in comparisons:
        ours, theirs = comparison.pairs.diverged.T
        alone = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        p_value = number(collapse_p_value(*alone), 2) if sum(alone) else "–"
        rows.append((comparison.pairs.treatment, *map(str, alone), str(int((ours & theirs).sum())), p_value))
    return Table(
        "Diverged runs, by matched pair; exact McNemar test of those that diverged alone.",
        ("Estimator", "It alone diverged", "The control alone diverged", "Both", "p"),
        rows,
    )


def _figure(assessment: Assessment, spreads: Sequence[_Spread]) -> Figure:
    control = assessment.sweep.plan.primary.control
    return Figure(
        _draw(assessment, spreads),
        f"Curves of the log ratio of {control}'s spread between replicates over each estimator's, at each "
        "training step, with the band that relabelled data stay in.",
        f"Above 0 the estimator's replicates are closer together than {control}'s. The band holds the whole "
        "curve in 95% of relabelled data: leaving it anywhere is evidence, crossing 0 is not.",
        Table(
            f"Log ratio of {control}'s spread over the estimator's.",
            ("Estimator", "Of", "Mean over steps", "Lowest", "Highest", "Band"),
            [
                (
                    spread.pairs.treatment,
                    spread.metric,
                    number(float(spread.test.curve.mean())),
                    number(float(spread.test.curve.min())),
                    number(float(spread.test.curve.max())),
                    f"± {number(spread.test.band)}",
                )
                for spread in spreads
            ],
        ),
    )


def _draw(assessment: Assessment, spreads: Sequence[_Spread]) -> str:
    styles = looks(assessment.sweep.plan.grid.arms, assessment.sweep.plan.primary.control)
    names = list(dict.fromkeys(spread.pairs.treatment for spread in spreads))
    metrics = list(dict.fromkeys(spread.metric for spread in spreads))
    with sheet(0.5 + 1.3 * len(names)) as drawn:
        panels = drawn.canvas.subplots(len(names), len(metrics), sharex=True, squeeze=False)
        for spread in spreads:
            axes = panels[names.index(spread.pairs.treatment)][metrics.index(spread.metric)]
            look = styles[spread.pairs.treatment]
            axes.axhspan(-spread.test.band, spread.test.band, color="#EEEEEE", zorder=0)
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.plot(spread.steps, spread.test.curve, color=look.colour, linestyle=look.dashes, linewidth=1)
            axes.set_title(f"{spread.pairs.treatment}: {spread.metric}", loc="left", fontsize=8)
            axes.tick_params(labelsize=7.5)
        for axes in panels[-1]:
            axes.set_xlabel("training step", fontsize=8)
    return drawn.svg
