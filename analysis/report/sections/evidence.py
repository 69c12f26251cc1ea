"""The e-process of the primary outcome, for plans that are sequential or changed after results."""

from collections.abc import Mapping

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import INK, legend_lines, looks, sheet
from analysis.stats.sequential import EProcess
from analysis.stats.text import number


def evidence(assessment: Assessment) -> Section | None:
    """The e-process of each comparison, also of an incomplete sweep."""
    found = {
        one.pairs.treatment: one.decision.evidence
        for one in assessment.comparisons
        if one.decision.evidence is not None
    }
    if not found or assessment.sweep.invalid:
        return None
    plan, first = assessment.sweep.plan, next(iter(found.values()))
    threshold, unit = first.threshold, first.unit
    better = assessment.comparisons[0].decision.primary.claim.favourable.removeprefix("a ")
    because = assessment.comparisons[0].decision.not_fixed
    return Section(
        "evidence",
        f"Evidence after each {unit}",
        paragraphs=[
            f"The e-process decides, because {because}. E is the wealth of a bettor who starts with 1 and "
            f"bets before each {unit} on which estimator has the {better}. The null hypothesis is that "
            f"either arm of a {unit} is equally likely to be ahead, however large the difference: it is "
            "about signs, not means. An arm that is ahead more often can have the worse mean, for example if "
            "a few of its runs collapse; the result is then inconclusive. Under the null hypothesis no "
            f"strategy gains, and the probability that E ever reaches {number(threshold)} for any comparison "
            f"is at most {plan.primary.alpha:g} (Bonferroni). This is valid for any stopping rule; with "
            "a design fixed in advance, the swap test needs fewer runs.",
            *(_sentence(name, plan.primary.control, one) for name, one in found.items()),
        ],
        figures=[_figure(assessment, found, threshold, unit)],
        numbers={
            name: {"e": one.values.tolist(), "threshold": threshold, "crossing": one.crossing}
            for name, one in found.items()
        },
    )


def _sentence(name: str, control: str, found: EProcess) -> str:
    threshold, unit = found.threshold, found.unit
    seen, last = len(found.values), float(found.values[-1])
    crossing = found.crossing
    ahead = int((found.differences > 0).sum())
    counts = f"{name} has the higher J in {ahead} of {seen} {unit}s"
    if crossing is None:
        return f"{name}: inconclusive so far, E = {number(last)} after {seen} {unit}s; {counts}."
    direction = "higher" if found.favours_treatment else "lower"
    return (
        f"{name} has a {direction} J than {control}: E reached {number(threshold)} at {unit} {crossing} and "
        f"is {number(last)} after {seen}; {counts}."
    )


def _figure(assessment: Assessment, found: Mapping[str, EProcess], threshold: float, unit: str) -> Figure:
    plan = assessment.sweep.plan
    styles = looks(plan.grid.arms, plan.primary.control)
    with sheet(2.6) as drawn:
        axes = drawn.canvas.subplots()
        for name, one in found.items():
            steps, values = np.arange(len(one.values) + 1), np.concatenate([[1.0], one.values])
            axes.plot(steps, values, linewidth=1.4, **styles[name].line)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.axhline(threshold, color=INK, linewidth=1, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"number of {unit}s")
        axes.set_ylabel("E (log scale)")
        drawn.legend(legend_lines({name: styles[name] for name in found}, lines=True))
    return Figure(
        drawn.svg,
        f"E against the number of {unit}s, one line for each estimator, with the threshold.",
        f"One step is one {unit}, in the order of replicates and β. The dotted line is the threshold "
        f"{number(threshold)}; E = 1 is evidence for neither.",
        Table.of(
            f"E of each comparison with {plan.primary.control}; n counts {unit}s.",
            found.items(),
            ("Arm", lambda row: row[0]),
            ("n", lambda row: str(len(row[1].values))),
            ("E", lambda row: number(row[1].values[-1])),
            ("Largest E", lambda row: number(row[1].values.max())),
            (f"Reached {number(threshold)} at", lambda row: str(row[1].crossing or "–")),
        ),
    )
