"""The blocks: what each is, its own mean difference, and which statements are over blocks."""

import json
from collections.abc import Iterator, Mapping, Sequence

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results import Block
from analysis.stats import Comparison
from analysis.stats.contrast import block_means
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.primary import primary_contrast
from analysis.stats.text import number, signed, these_blocks

# What is not a mean over matched pairs.
_POOLED = (
    "Frontier shares, hypervolume, reward at matched KL, spread between replicates, the step at which the "
    "control's end is reached, outcomes at equal time, the e-process, and intervals of single arms and betas"
)
# Arm -> label of a block -> its mean difference.
_Means = Mapping[str, Mapping[str, Estimate]]


def blocks(assessment: Assessment) -> Section | None:
    """The mean difference of each block; None without blocks."""
    plan, comparisons = assessment.sweep.plan, assessment.comparisons
    if not plan.grid.blocks or not comparisons:
        return None
    labels, outcome = list(plan.grid.blocks), plan.primary.outcome
    means = {
        one.pairs.treatment: {
            labels[index]: mean
            for index, mean in block_means(primary_contrast(one.pairs, outcome), one.pairs).items()
        }
        for one in comparisons
    }
    return Section(
        "blocks",
        "Blocks",
        paragraphs=[f"{block_condition(assessment)} {_which(comparisons[0])}"],
        tables=[_differences(comparisons, means)],
        details=[_contents(plan.grid.blocks)],
        numbers={arm: {label: mean.value for label, mean in own.items()} for arm, own in means.items()},
    )


def block_condition(assessment: Assessment) -> str:
    """Whether the verdict is about other blocks, in a sentence; "" without blocks."""
    labels, decision = list(assessment.sweep.plan.grid.blocks), assessment.comparisons[0].decision
    if not labels:
        return ""
    found = f"The replicates are of {len(labels)} blocks ({', '.join(labels)})."
    if decision.primary.over_blocks and decision.evidence is None:
        return f"{found} The verdict is about others like them, as far as these are a sample of such blocks."
    return f"{found} All statements hold {these_blocks(decision.primary.blocks)} only."


def _which(comparison: Comparison) -> str:
    if comparison.pairs.over_blocks:
        return (
            "Mean differences between arms are means of the blocks' means, with t tests and t intervals over "
            f"these. {_POOLED} pool the pairs of all blocks and are conditional on these."
        )
    return (
        "They are too few to show how much blocks differ. Tests swap labels within pairs, and intervals of "
        "mean differences have the variance of pairs within blocks."
    )


def _differences(comparisons: Sequence[Comparison], means: _Means) -> Table:
    primary = comparisons[0].decision.primary
    return Table(
        f"Difference to {primary.control} in {primary.claim.subject} ({primary.unit}) in each block, each β "
        "counting the same, with its 95% t interval over the block's own pairs, not corrected for multiple "
        "comparisons; over all blocks the estimate that is tested, with its simultaneous interval.",
        ("Arm", "Block", "Difference", "Interval"),
        [row for one in comparisons for row in _rows(one, means[one.pairs.treatment])],
    )


def _rows(comparison: Comparison, means: Mapping[str, Estimate]) -> Iterator[tuple[str, ...]]:
    name, primary = comparison.pairs.treatment, comparison.decision.primary
    for label, mean in means.items():
        yield name, label, signed(mean.value), _ends(mean.interval())
    yield name, "all", signed(primary.estimate.value), _ends(primary.interval)


def _ends(interval: Interval | None) -> str:
    return "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}"


def _contents(found: Mapping[str, Block]) -> Table:
    rows = []
    for label, block in found.items():
        values = {key: json.dumps(value, ensure_ascii=False) for key, value in block.overrides.items()}
        rows.append((label, "; ".join(f"{key} = {text}" for key, text in {**values, **block.inputs}.items())))
    return Table(
        "What the runs of each block share: configuration keys with their values, or with the stage whose "
        "checkpoint they receive.",
        ("Block", "Shares"),
        rows,
    )
