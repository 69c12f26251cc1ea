"""Fig. 2 and the table of tests: paired differences in J and in reward at matched KL."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, Look, legend_lines, looks, sheet, thinned, thinning
from analysis.stats import Comparison, Pairs, Verdict
from analysis.stats.contrast import (
    LOG_RATIO,
    Contrast,
    block_means,
    equal_betas,
    kl_contrast,
    objective_contrast,
)
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.pairs import FloatArray
from analysis.stats.text import (
    aligned,
    aligned_ends,
    decimals_of,
    ends_text,
    number,
    percent,
    share_text,
    signed,
)


def outcomes(assessment: Assessment) -> Section | None:
    """All tests with their counts."""
    if not assessment.comparisons:
        return None
    curve = (
        "Reward at matched KL is the difference in reward given one curve c0 + c1·√KL + c2·KL + c3·√KL³ for "
        "both arms; it is not estimated if the KLs do not overlap."
    )
    by_kl = assessment.comparisons[0].fit is None
    return Section(
        "outcomes",
        "All tests",
        paragraphs=[] if by_kl else [curve],
        details=[_tests(assessment)] if not assessment.withheld else (),
        numbers={
            comparison.pairs.treatment: {
                panel.verdict.claim.key: {
                    str(index): estimate.value for index, estimate in panel.by_beta(comparison.pairs).items()
                }
                for panel in _panels(comparison)
            }
            for comparison in assessment.comparisons
        },
    )


def forests(assessment: Assessment) -> list[Figure]:
    """Forest plots of differences to the control, one for each unit."""
    comparisons = assessment.comparisons
    units = dict.fromkeys(one.primary.unit for one in comparisons)  # ranks if a run diverged
    return [_forest(assessment, [c for c in comparisons if c.primary.unit == unit]) for unit in units]


@dataclass(frozen=True, eq=False)
class _Panel:
    """One outcome of one comparison: differences of the pairs [P], and the verdict on their mean.

    Single betas have no interval if it would ignore the uncertainty of the fitted curve.
    """

    title: str
    values: FloatArray
    verdict: Verdict
    intervals: bool = True

    def by_beta(self, pairs: Pairs) -> dict[int, Estimate]:
        """Mean difference at each β, with its standard error over replicates."""
        parts = {int(index): self.values[pairs.beta_index == index] for index in pairs.beta_indices}
        return {index: self._shown(Estimate.of_mean(part)) for index, part in parts.items()}

    def by_block(self, pairs: Pairs) -> dict[int, Estimate]:
        """Mean difference in each block, each β counting the same; empty without blocks."""
        contrast = Contrast(self.values, equal_betas(pairs), "", ranked=True)
        found = block_means(contrast, pairs) if pairs.blocks else {}
        return {index: self._shown(mean) for index, mean in found.items()}

    def _shown(self, mean: Estimate) -> Estimate:
        return mean if self.intervals else Estimate(mean.value)


def _panels(comparison: Comparison) -> list[_Panel]:
    pairs, primary = comparison.pairs, comparison.primary
    if primary.claim.key == "kl":
        return [_Panel("KL", kl_contrast(pairs).values, primary)]
    found = [_Panel("J = reward − β·KL", objective_contrast(pairs).values, primary)]
    if comparison.fit is not None and not comparison.fit.refused:
        found.append(
            _Panel("Reward at matched KL", comparison.fit.differences, comparison.matched, intervals=False)
        )
    return found


def _rows(comparison: Comparison, blocks: Sequence[str]) -> Iterator[tuple[str, ...]]:
    pairs = comparison.pairs
    for panel in _panels(comparison):
        by_beta, by_block, verdict = panel.by_beta(pairs), panel.by_block(pairs), panel.verdict
        shown = [("all", verdict.estimate.value, verdict.interval, pairs.replicates)]
        for index, mean in reversed(by_block.items()):
            replicates = pairs.subset(pairs.block == index).replicates
            shown.insert(0, (f"all, block {blocks[index]}", mean.value, mean.interval(), replicates))
        for index, mean in reversed(by_beta.items()):
            betas = pairs.beta[pairs.beta_index == index]
            shown.insert(0, (f"{betas[0]:g}", mean.value, mean.interval(), len(betas)))
        decimals = decimals_of(mean.value for mean in by_beta.values())
        for where, value, interval, count in shown:
            numbers = aligned(value, decimals, sign=True), aligned_ends(interval, decimals)
            yield (pairs.treatment, f"{panel.title} ({verdict.unit})", where, *numbers, str(count))


def _tests(assessment: Assessment) -> Table:
    alpha, comparisons = assessment.sweep.plan.primary.alpha, assessment.comparisons
    primary = comparisons[0].primary
    p_value = "p (t, or swap)"
    levels = f"{percent(1 - primary.level)} for the first two"
    if others := comparisons[0].secondary:
        levels += f", {percent(1 - others[0].level)} for the others"
    return Table.of(
        f"All planned tests, two-sided at {alpha:g}. “{primary.claim.key}” is the primary outcome, "
        "corrected over the planned comparisons; “matched_kl” is a separate family, tested only "
        "where the primary test rejects; all others are descriptive and form one family. Each p and its "
        "interval are of one test, simultaneous in its family (Bonferroni): an interval excludes 0 if and "
        f"only if the corrected p is at most {alpha:g}. Their levels: {levels}; intervals of "
        "frontier shares, 95% each, are of so many independent points, which those of a frontier are not. "
        "The hypervolume is that of each replicate's runs, on log KL and reward, up to the worst of any run. "
        "The spread between replicates is the sum of absolute deviations from their median at the same step, "
        "β and arm, for the KL that of its logarithm; its ratio is over all training steps, in each of which "
        "that of both arms is 1. Roughness is that of squared increments within runs. “collapses” is "
        "McNemar's exact test of pairs in which only one run diverged. “Least p” is the smallest attainable "
        "corrected p.",
        [verdict for comparison in comparisons for verdict in comparison.verdicts],
        ("Test", lambda verdict: f"{verdict.claim.key}: {verdict.claim.subject}"),
        ("Arm", lambda verdict: verdict.treatment),
        ("Estimate", _estimate),
        ("Interval", lambda verdict: ends_text(_shown(verdict))),
        (p_value, lambda verdict: number(verdict.test.p_value, 2)),
        ("p (corrected)", lambda verdict: number(verdict.adjusted, 2)),
        ("Least p", lambda verdict: number(verdict.attainable, 2)),
        ("Verdict", lambda verdict: verdict.label),
    )


def _shown(verdict: Verdict) -> Interval | None:
    """The interval of a verdict; that of a ratio instead of its logarithm."""
    return verdict.interval and verdict.interval.exp() if verdict.unit == LOG_RATIO else verdict.interval


def _estimate(verdict: Verdict) -> str:
    share, value = verdict.share, verdict.estimate.value
    if share is None:
        ratio = verdict.unit == LOG_RATIO
        return f"ratio {number(math.exp(value))}" if ratio else f"{signed(value)} {verdict.unit}"
    return f"{share_text(share)}; |F| = {share.total}, D = {share.discordant}"


def _forest(assessment: Assessment, comparisons: Sequence[Comparison]) -> Figure:
    """One forest plot of comparisons whose differences have the same unit."""
    plan = assessment.sweep.plan
    control, blocks = plan.primary.control, list(plan.grid.blocks)
    one, own = ("β or block", "The mean of a block is over all β. ") if blocks else ("β", "")
    return Figure(
        lambda: _draw(assessment, comparisons),
        f"Forest plot of differences to {control} in each outcome, per β and overall.",
        "Each small dot is one matched pair; the mark is the mean over replicates. “All β” is the quantity "
        f"that is tested, with its simultaneous interval; a single {one} has a 95% t interval and is shown "
        f"for orientation. {own}{thinning()}",
        Table(
            f"Differences to {control}, with the intervals of the figure; those at each {one} are not "
            "corrected for multiple comparisons.",
            ("Arm", "Outcome", "β", "Difference", "Interval", "Replicates"),
            [row for comparison in comparisons for row in _rows(comparison, blocks)],
        ),
    )


def _draw(assessment: Assessment, comparisons: Sequence[Comparison]) -> str:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    spacing = 0.8 / len(comparisons)
    ticks = [f"β = {beta:g}" for beta in plan.grid.beta.values()]
    ticks += [*(f"block {label}" for label in plan.grid.blocks), "all β"]
    with sheet(1.6 + 0.3 * len(comparisons) * len(ticks)) as drawn:
        titles = list(dict.fromkeys(panel.title for c in comparisons for panel in _panels(c)))
        panels = drawn.canvas.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        for axes, title in zip(panels, titles, strict=True):
            for index, comparison in enumerate(comparisons):
                panel = next((panel for panel in _panels(comparison) if panel.title == title), None)
                if panel is None:
                    continue
                pairs = comparison.pairs
                offset = (index - (len(comparisons) - 1) / 2) * spacing
                places = {index: row + offset for row, index in enumerate(plan.grid.beta)}
                rows = [places[index] - 0.3 * spacing for index in pairs.beta_index]
                look = styles[pairs.treatment]
                dots: dict[str, Any] = {"color": look.colour, "alpha": 0.55, "markersize": 4, "zorder": 2}
                axes.plot(thinned(panel.values), thinned(rows), ".", **dots)
                for index, estimate in panel.by_beta(pairs).items():
                    _draw_estimate(axes, estimate.value, estimate.interval(), places[index], look)
                for index, estimate in panel.by_block(pairs).items():
                    row = len(plan.grid.beta) + index + offset
                    _draw_estimate(axes, estimate.value, estimate.interval(), row, look)
                overall = panel.verdict.estimate.value, panel.verdict.interval
                _draw_estimate(axes, *overall, len(ticks) - 1 + offset, look)
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.set_title(title, loc="left")
            axes.set_xlabel(f"difference to {plan.primary.control}\n({comparisons[0].primary.unit})")
            axes.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(ticks)), ticks)
        panels[0].invert_yaxis()
        shown = {one.pairs.treatment: styles[one.pairs.treatment] for one in comparisons}
        drawn.legend(legend_lines(shown, lines=False), columns=2)
    return drawn.svg


def _draw_estimate(axes: Axes, value: float, interval: Interval | None, place: float, look: Look) -> None:
    if interval is not None:
        axes.plot(interval.ends, [place, place], color=look.colour, linewidth=1.6, zorder=3)
    mark: dict[str, Any] = {"color": look.colour, "markeredgecolor": "white", "markersize": 7}
    axes.plot([value], [place], look.marker, zorder=4, **mark)
