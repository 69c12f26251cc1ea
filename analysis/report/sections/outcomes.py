"""Fig. 2 and the tables of tests and counts: paired differences in what decides, and what else moved."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes

from analysis.report.assessment import Assessment, level_of
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, Look, legend_lines, looks, sheet, thinned, thinning
from analysis.stats import Comparison, Verdict
from analysis.stats.comparison import primary_contrast
from analysis.stats.contrast import LOG_RATIO, block_means
from analysis.stats.frontier import dominations, pooled_share
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.text import aligned, aligned_ends, decimals_of, ends_text, number, signed


def outcomes(assessment: Assessment) -> Section | None:
    """All tests, and what is only counted or described."""
    comparisons = assessment.comparisons
    if not comparisons:
        return None
    of_reward = [one for one in comparisons if one.matched is not None]
    numbers: dict[str, Any] = {}
    for one in comparisons:
        values = {str(index): mean.value for index, mean in _by_beta(one).items()}
        numbers[one.pairs.treatment] = {one.primary.claim.key: values} | (
            _counts(one) if one.matched is not None else {}
        )
    return Section(
        "outcomes",
        "All tests, and counts",
        details=[
            *([] if assessment.withheld else [_tests(assessment)]),
            *([_counted(of_reward)] if of_reward else []),
        ],
        numbers=numbers,
    )


def forests(assessment: Assessment) -> list[Figure]:
    """Forest plots of differences to the control, one for each unit."""
    comparisons = assessment.comparisons
    units = dict.fromkeys(one.primary.unit for one in comparisons)  # ranks if a run diverged
    return [_forest(assessment, [c for c in comparisons if c.primary.unit == unit]) for unit in units]


def _by_beta(comparison: Comparison) -> dict[int, Estimate]:
    """Mean difference at each β, with its standard error over replicates."""
    pairs = comparison.pairs
    values = primary_contrast(pairs, comparison.primary.claim.key).values
    return {int(index): Estimate.of_mean(values[pairs.beta_index == index]) for index in pairs.beta_indices}


def _by_block(comparison: Comparison) -> dict[int, Estimate]:
    """Mean difference in each block, each β counting the same; empty without blocks."""
    pairs = comparison.pairs
    contrast = primary_contrast(pairs, comparison.primary.claim.key)
    return block_means(contrast, pairs) if pairs.blocks else {}


def _title(comparison: Comparison) -> str:
    return "KL" if comparison.primary.claim.key == "kl" else "J = reward − β·KL"


def _rows(comparison: Comparison, blocks: Sequence[str]) -> Iterator[tuple[str, ...]]:
    pairs, verdict, level = comparison.pairs, comparison.primary, 1 - comparison.primary.level
    by_beta = _by_beta(comparison)
    shown = []
    for index, mean in by_beta.items() if len(by_beta) > 1 else ():
        betas = pairs.beta[pairs.beta_index == index]
        shown.append((f"{betas[0]:g}", mean.value, mean.interval(level), len(betas)))
    for index, mean in _by_block(comparison).items():
        replicates = pairs.subset(pairs.block == index).replicates
        shown.append((f"block {blocks[index]}", mean.value, mean.interval(level), replicates))
    shown.append(("all", verdict.estimate.value, verdict.interval, pairs.replicates))
    decimals = decimals_of(value for _, value, _, _ in shown)
    for where, value, interval, count in shown:
        numbers = aligned(value, decimals, sign=True), aligned_ends(interval, decimals)
        yield (pairs.treatment, where, *numbers, str(count))


def _tests(assessment: Assessment) -> Table:
    comparisons = assessment.comparisons
    alpha, others = assessment.sweep.plan.primary.alpha, comparisons[0].secondary
    levels = f"{level_of(comparisons[0].primary)} for what decides"
    levels += f", {level_of(others[0])} for the others" if others else ""
    return Table.of(
        f"All tests, two-sided at {alpha:g}. “{comparisons[0].primary.claim.key}” decides, corrected over "
        "the planned comparisons; the others describe, and are one family. An interval excludes 0 only if "
        f"its corrected p (Bonferroni) is at most {alpha:g}. Levels: {levels}. The spread is the sum of "
        "absolute deviations from the median of each arm and β, for the KL of its logarithm.",
        [verdict for comparison in comparisons for verdict in comparison.verdicts],
        ("Test", lambda verdict: f"{verdict.claim.key}: {verdict.claim.subject}"),
        ("Arm", lambda verdict: verdict.treatment),
        ("Estimate", _estimate),
        ("Interval", lambda verdict: ends_text(_shown(verdict))),
        ("p", lambda verdict: number(verdict.test.p_value, 2)),
        ("p (corrected)", lambda verdict: number(verdict.adjusted, 2)),
        ("Verdict", lambda verdict: verdict.label),
    )


def _shown(verdict: Verdict) -> Interval | None:
    """The interval of a verdict; that of a ratio instead of its logarithm."""
    return verdict.interval and verdict.interval.exp() if verdict.unit == LOG_RATIO else verdict.interval


def _estimate(verdict: Verdict) -> str:
    value = verdict.estimate.value
    ratio = verdict.unit == LOG_RATIO
    return f"ratio {number(math.exp(value))}" if ratio else f"{signed(value)} {verdict.unit}"


def _counts(comparison: Comparison) -> dict[str, Any]:
    """Points of the arm and of both on the frontier; pairs in which it dominates, and is dominated."""
    share, (won, lost) = pooled_share(comparison.pairs), dominations(comparison.pairs)
    return {"frontier": [share.count, share.total], "dominates": won, "dominated": lost}


def _counted(comparisons: Sequence[Comparison]) -> Table:
    control = comparisons[0].pairs.control

    def at_matched_kl(one: Comparison) -> str:
        assert one.matched is not None
        interval = ends_text(one.matched.estimate.interval())
        return one.matched.refused or f"{signed(one.matched.estimate.value)} ({interval})"

    def counted(one: Comparison) -> str:
        share = pooled_share(one.pairs)
        return f"{share.count} of {share.total}"

    return Table.of(
        f"Counts and descriptions, without a test. Frontier: the arm's, of its runs and those of {control} "
        "that no other run dominates in reward and KL; a larger share also comes from a larger spread. "
        "Dominates: matched pairs in which the arm's run has no less reward and no more KL. At matched KL: "
        "the reward, given one curve c0 + c1·√KL + c2·KL + c3·√KL³ for both arms (95 % interval).",
        comparisons,
        ("Arm", lambda one: one.pairs.treatment),
        ("Frontier", counted),
        ("Dominates", lambda one: f"{dominations(one.pairs)[0]} of {len(one.pairs)}"),
        ("Is dominated", lambda one: f"{dominations(one.pairs)[1]} of {len(one.pairs)}"),
        ("Reward at matched KL", at_matched_kl),
    )


def _forest(assessment: Assessment, comparisons: Sequence[Comparison]) -> Figure:
    """One forest plot of comparisons whose differences have the same unit."""
    plan = assessment.sweep.plan
    control, blocks = plan.primary.control, list(plan.grid.blocks)
    pairs = len(plan.grid.beta) * plan.grid.replicates
    several = {"β": len(plan.grid.beta) > 1, "block": bool(blocks) and pairs > len(blocks)}
    parts = [name for name, more in several.items() if more]
    note = (
        f" A single {' or '.join(parts)} has a t interval of the same level, not corrected." if parts else ""
    )
    return Figure(
        lambda: _draw(assessment, comparisons),
        f"Forest plot of differences to {control} in {comparisons[0].primary.claim.subject}.",
        "Each small dot is one matched pair; the mark is the mean over replicates. “All” is what is tested, "
        f"with its simultaneous interval.{note}{thinning(pairs)}",
        Table(
            f"Differences to {control}, with the intervals of the figure.",
            ("Arm", "Where", "Difference", "Interval", "Replicates"),
            [row for comparison in comparisons for row in _rows(comparison, blocks)],
        ),
    )


def _draw(assessment: Assessment, comparisons: Sequence[Comparison]) -> str:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    spacing = 0.8 / len(comparisons)
    betas = plan.grid.beta if len(plan.grid.beta) > 1 else {}
    ticks = [
        *(f"β = {beta:g}" for beta in betas.values()),
        *(f"block {one}" for one in plan.grid.blocks),
        "all",
    ]
    with sheet(1.6 + 0.3 * len(comparisons) * len(ticks)) as drawn:
        axes = drawn.canvas.subplots()
        for number, one in enumerate(comparisons):
            pairs, look, level = one.pairs, styles[one.pairs.treatment], 1 - one.primary.level
            offset = (number - (len(comparisons) - 1) / 2) * spacing
            last = len(ticks) - 1 + offset
            places = {index: row + offset for row, index in enumerate(betas)}
            heights = [places.get(int(index), last) - 0.3 * spacing for index in pairs.beta_index]
            values = primary_contrast(pairs, one.primary.claim.key).values
            dots: dict[str, Any] = {"color": look.colour, "alpha": 0.55, "markersize": 4, "zorder": 2}
            axes.plot(thinned(values), thinned(heights), ".", **dots)
            for index, mean in _by_beta(one).items() if betas else ():
                _draw_estimate(axes, mean.value, mean.interval(level), places[index], look)
            for index, mean in _by_block(one).items():
                _draw_estimate(axes, mean.value, mean.interval(level), len(betas) + index + offset, look)
            _draw_estimate(axes, one.primary.estimate.value, one.primary.interval, last, look)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_title(_title(comparisons[0]), loc="left")
        axes.set_xlabel(f"difference to {plan.primary.control} ({comparisons[0].primary.unit})")
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(ticks)), ticks)
        axes.invert_yaxis()
        shown = {one.pairs.treatment: styles[one.pairs.treatment] for one in comparisons}
        drawn.legend(legend_lines(shown, lines=False), columns=2)
    return drawn.svg


def _draw_estimate(axes: Axes, value: float, interval: Interval | None, height: float, look: Look) -> None:
    if interval is not None:
        axes.plot(interval.ends, [height, height], color=look.colour, linewidth=1.6, zorder=3)
    mark: dict[str, Any] = {"color": look.colour, "markeredgecolor": "white", "markersize": 7}
    axes.plot([value], [height], look.marker, zorder=4, **mark)
