"""The spread between replicates over the whole of training."""

from collections.abc import Sequence

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats import Comparison, Verdict
from analysis.stats.secondary import Spread
from analysis.stats.text import number
from lit_klrb import schema


def stability(assessment: Assessment) -> Section | None:
    """Spread between replicates over training, roughness within runs, and diverged runs."""
    spreads = [(comparison, spread) for comparison in assessment.comparisons for spread in comparison.spreads]
    if not spreads or assessment.withheld:
        return None
    return Section(
        "stability",
        "Stability of training",
        paragraphs=[
            "Spread is the sum over replicates of the absolute deviation from their median at the same step, "
            "β and arm. For the KL it is that of its logarithm, as the spread of a KL increases with its "
            "level. The ratio of spreads is that of their sums over all training steps, in each of which "
            "that of both arms is 1. These tests are descriptive and listed with the others.",
        ],
        tables=[_table(spreads), *_collapses(assessment.comparisons)],
        folded=True,
        numbers={
            f"{spread.curves.pairs.treatment}, {spread.curves.metric}": {
                "log_ratio": (verdict := _verdicts(comparison, spread)[0]).estimate.value,
                "p": verdict.test.p_value,
                "p_adjusted": verdict.adjusted,
                "p_any_step": spread.test.pointwise.p_value,
                "outcome": verdict.outcome.value,
            }
            for comparison, spread in spreads
        },
    )


def _verdicts(comparison: Comparison, spread: Spread) -> tuple[Verdict, Verdict, Verdict]:
    """The secondary verdicts on a metric's curves: on the spread, the spread at any step, the roughness."""
    metric = spread.curves.metric
    keys = (f"spread_{metric}", f"spread_{metric}_at_any_step", f"roughness_{metric}")
    mean, largest, roughness = (verdict for key in keys if (verdict := comparison.of(key)) is not None)
    return mean, largest, roughness


def _table(rows: Sequence[tuple[Comparison, Spread]]) -> Table:
    return Table.of(
        "Spread between replicates relative to the control, each training step counting the same, with its "
        "simultaneous interval. Any step: test of the largest ratio at a single "
        "step, corrected for the number of steps. Roughness: squared increments within runs, relative to the "
        "control. All p-values are corrected over all descriptive tests.",
        [(spread, *_verdicts(comparison, spread)) for comparison, spread in rows],
        ("Arm", lambda row: row[0].curves.pairs.treatment),
        ("Metric", lambda row: "reward" if row[0].curves.metric == schema.REWARD else "log KL"),
        ("Ratio", lambda row: float(np.exp(row[1].estimate.value))),
        ("Interval", lambda row: row[1].interval and row[1].interval.exp()),
        ("p", lambda row: number(row[1].adjusted, 2)),
        ("p, any step", lambda row: number(row[2].adjusted, 2)),
        ("Roughness", lambda row: float(np.exp(row[3].estimate.value))),
        ("p", lambda row: number(row[3].adjusted, 2)),
        ("Verdict on the spread", lambda row: row[1].label),
    )


def _collapses(comparisons: Sequence[Comparison]) -> list[Table]:
    """The pairs with diverged runs, if there are any."""
    if not any(comparison.pairs.diverged.any() for comparison in comparisons):
        return []
    rows = []
    for comparison in comparisons:
        ours, theirs = comparison.pairs.diverged.T
        alone = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        verdict = comparison.of("collapses")
        p_value = "–" if verdict is None else number(verdict.adjusted, 2)
        rows.append((comparison.pairs.treatment, *map(str, alone), str(int((ours & theirs).sum())), p_value))
    return [
        Table(
            "Matched pairs with diverged runs; exact McNemar test of pairs in which only one run diverged, "
            "corrected over all descriptive tests.",
            ("Arm", "Only it diverged", "Only the control diverged", "Both", "p"),
            rows,
        )
    ]
