"""Fig. 2 and the table of tests: paired differences in J and in reward at matched KL."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, MANY, Look, legend_lines, looks, sheet
from analysis.stats import Comparison, Pairs, Verdict
from analysis.stats.comparison import mean_of
from analysis.stats.contrast import Contrast
from analysis.stats.intervals import Estimate
from analysis.stats.matched_kl import matched_kl_contrast
from analysis.stats.max_t import objective_max_t
from analysis.stats.objective import objective_contrast
from analysis.stats.text import number, share_text, signed

CONTRASTS = {"J = reward − β·KL": objective_contrast, "Reward at matched KL": matched_kl_contrast}


def outcomes(assessment: Assessment) -> Section | None:
    """Forest plots by β, and every test with its counts."""
    if not assessment.comparisons:
        return None
    control = assessment.sweep.plan.primary.control
    units = dict.fromkeys(unit_of(comparison) for comparison in assessment.comparisons)
    return Section(
        "outcomes",
        f"Differences to {control}",
        paragraphs=[
            "J = reward − β·KL is what training maximises, so it is the primary outcome. Reward at matched "
            "KL is the second: what is left of the reward after one curve in √KL fitted to all runs."
        ],
        figures=[
            _forest(assessment, [c for c in assessment.comparisons if unit_of(c) == unit]) for unit in units
        ],
        tables=[_tests(assessment), *_all_at_once(assessment)] if not assessment.withheld else (),
        numbers={
            comparison.pairs.treatment: {
                name: {
                    str(index): estimate.value
                    for index, estimate in by_beta(contrast_of(comparison.pairs), comparison.pairs).items()
                }
                for name, contrast_of in CONTRASTS.items()
            }
            for comparison in assessment.comparisons
        },
    )


def unit_of(comparison: Comparison) -> str:
    """Unit of a comparison's differences: ranks once a run diverged."""
    return comparison.decision.objective.unit


def by_beta(contrast: Contrast, pairs: Pairs) -> dict[int, Estimate]:
    """Mean difference at each β, with its standard error over replicates."""
    found = {}
    for index in pairs.beta_indices:
        part = contrast.values[pairs.beta_index == index]
        error = float(part.std(ddof=1) / np.sqrt(len(part))) if len(part) > 1 else math.nan
        found[int(index)] = Estimate(float(part.mean()), error, len(part) - 1.0)
    return found


def _beta_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    pairs = comparison.pairs
    for name, contrast_of in CONTRASTS.items():
        contrast = contrast_of(pairs)
        named = (pairs.treatment, f"{name} ({contrast.unit})")
        for index, estimate in by_beta(contrast, pairs).items():
            rows = pairs.beta_index == index
            beta = f"{pairs.beta[rows][0]:g}"
            yield (*named, beta, signed(estimate.value), _bare(estimate), str(int(rows.sum())))
        overall = mean_of(contrast, pairs)
        yield (*named, "all", signed(overall.value), _bare(overall), str(pairs.replicates))


def _bare(estimate: Estimate) -> str:
    interval = estimate.interval()
    return "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}"


def _tests(assessment: Assessment) -> Table:
    alpha = assessment.sweep.plan.primary.alpha
    not_fixed = assessment.comparisons[0].decision.not_fixed
    return Table(
        (f"Exploratory, because {not_fixed}. " if not_fixed else "")
        + f"Every planned test, two-sided at {alpha:g}. “objective” and “matched_kl” form one Holm family "
        "over all comparisons; the others describe and form another. “Least p” is the smallest corrected p "
        "that this design allows.",
        ("Test", "Estimator", "Estimate", "95% CI", "p (swap)", "p (Holm)", "Least p", "Verdict"),
        [_test_row(verdict) for comparison in assessment.comparisons for verdict in comparison.verdicts],
    )


def _all_at_once(assessment: Assessment) -> list[Table]:
    """A second correction of the test of J: the maximum over all comparisons, if there are several."""
    comparisons = assessment.comparisons
    p_values = objective_max_t([one.pairs for one in comparisons]) if len(comparisons) > 1 else None
    if p_values is None:
        return []
    return [
        Table(
            "J once more, all comparisons at once: p of the largest difference when all estimators' labels "
            "are permuted within their matched sets (max-T, Westfall and Young). It takes all estimators to "
            "be exchangeable under the null; the verdicts rest on Holm's correction, which does not.",
            ("Estimator", "p (max-T)", "p (Holm)"),
            [
                (one.pairs.treatment, number(float(p_value), 2), number(one.decision.objective.adjusted, 2))
                for one, p_value in zip(comparisons, p_values, strict=True)
            ],
        )
    ]


def _test_row(verdict: Verdict) -> tuple[str, ...]:
    share, interval = verdict.share, verdict.interval
    if share is not None:
        estimate = f"{share_text(share)}; |F| = {share.total}, D = {share.discordant}"
    else:
        estimate = f"{signed(verdict.estimate.value)} {verdict.unit}"
    return (
        f"{verdict.claim.key}: {verdict.claim.subject}",
        verdict.treatment,
        estimate,
        "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}",
        number(verdict.test.p_value, 2),
        number(verdict.adjusted, 2),
        number(verdict.attainable, 2),
        verdict.label,
    )


def _forest(assessment: Assessment, comparisons: Sequence[Comparison]) -> Figure:
    """One forest plot of comparisons whose differences have the same unit."""
    control = assessment.sweep.plan.primary.control
    return Figure(
        _draw(assessment, comparisons),
        f"Forest plot of differences to {control} in J and in reward at matched KL, for each β and overall.",
        "Each small dot is one matched pair; the mark with its bar is the mean over replicates and its 95% t "
        f"interval. Right of zero favours the estimator over {control}. “All β” is the quantity that is "
        "tested; a single β is shown for orientation.",
        Table(
            f"Differences to {control} by β: mean over matched pairs with its 95% t interval over "
            "replicates, not corrected for looking at several β.",
            ("Estimator", "Outcome", "β", "Difference", "95% CI", "Replicates"),
            [row for comparison in comparisons for row in _beta_rows(comparison)],
        ),
    )


def _draw(assessment: Assessment, comparisons: Sequence[Comparison]) -> str:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    spacing = 0.8 / len(comparisons)
    with sheet(1.6 + 0.3 * len(comparisons) * (len(plan.grid.beta) + 1)) as drawn:
        panels = drawn.canvas.subplots(1, 2, sharey=True)
        for axes, (title, contrast_of) in zip(panels, CONTRASTS.items(), strict=True):
            for index, comparison in enumerate(comparisons):
                pairs, contrast = comparison.pairs, contrast_of(comparison.pairs)
                offset = (index - (len(comparisons) - 1) / 2) * spacing
                places = {index: row + offset for row, index in enumerate(plan.grid.beta)}
                rows = [places[index] - 0.3 * spacing for index in pairs.beta_index]
                look = styles[pairs.treatment]
                dots: dict[str, Any] = {"color": look.colour, "alpha": 0.55, "markersize": 4, "zorder": 2}
                many = len(pairs) * len(comparisons) > MANY
                axes.plot(contrast.values, rows, ".", rasterized=many, **dots)
                for index, estimate in by_beta(contrast, pairs).items():
                    _draw_estimate(axes, estimate, places[index], look)
                _draw_estimate(axes, mean_of(contrast, pairs), len(plan.grid.beta) + offset, look)
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.set_title(title, loc="left")
            axes.set_xlabel(f"difference to {plan.primary.control}\n({unit_of(comparisons[0])})", fontsize=8)
            axes.grid(visible=False, axis="y")
        labels = [*(f"β = {beta:g}" for beta in plan.grid.beta.values()), "all β"]
        panels[0].set_yticks(range(len(labels)), labels)
        panels[0].invert_yaxis()
        shown = {comparison.pairs.treatment: styles[comparison.pairs.treatment] for comparison in comparisons}
        handles = legend_lines(shown, lines=False)
        drawn.canvas.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=8)
    return drawn.svg


def _draw_estimate(axes: Axes, estimate: Estimate, place: float, look: Look) -> None:
    interval = estimate.interval()
    if interval is not None:
        ends = [interval.low, interval.high]
        axes.plot(ends, [place, place], color=look.colour, linewidth=1.6, zorder=3)
    mark: dict[str, Any] = {"color": look.colour, "markeredgecolor": "white", "markersize": 7}
    axes.plot([estimate.value], [place], look.marker, zorder=4, **mark)
