"""The blocks: what each is, and which statements are over blocks."""

import json

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.blocks import most_unseen
from analysis.stats.contrast import block_means
from analysis.stats.primary import primary_contrast
from analysis.stats.text import count, these_blocks, whole_percent

_OVER = (
    "Mean differences are means of the blocks' means, with t tests and t intervals over these. Whatever else "
    "is tested or drawn pools the pairs of all blocks and is conditional on these."
)
_WITHIN = (
    "Tests swap labels within pairs, and intervals of mean differences have the variance of pairs within "
    "blocks: neither shows how much blocks differ."
)


def blocks(assessment: Assessment) -> Section | None:
    """What the runs of each block share; None without blocks."""
    plan, comparisons = assessment.sweep.plan, assessment.comparisons
    if not plan.grid.blocks or not comparisons:
        return None
    over = any(comparison.decision.primary.over_blocks for comparison in comparisons)
    return Section(
        "blocks",
        "Blocks",
        paragraphs=[f"{block_condition(assessment)} {_OVER if over else _WITHIN}"],
        tables=[_contents(assessment)],
        numbers={
            one.pairs.treatment: {
                list(plan.grid.blocks)[index]: mean.value
                for index, mean in block_means(
                    primary_contrast(one.pairs, plan.primary.outcome), one.pairs
                ).items()
            }
            for one in comparisons
        },
    )


def block_condition(assessment: Assessment) -> str:
    """Whether the verdicts are about other blocks, in a sentence or two; "" without blocks."""
    labels, comparisons = list(assessment.sweep.plan.grid.blocks), assessment.comparisons
    if not labels:
        return ""
    same = assessment.sweep.distinct_blocks
    found = f"The replicates are of {count(len(set(same)), 'block')} ({', '.join(labels)})."
    for first in sorted(set(same)):
        if same.count(first) > 1:
            names = ", ".join(label for label, one in zip(labels, same, strict=True) if one == first)
            found += f" {names} have the same weights and settings and count as one."
    over = [one.pairs.treatment for one in comparisons if one.decision.primary.over_blocks]
    if not over:
        return f"{found} All statements hold {these_blocks(comparisons[0].decision.primary.blocks)} only."
    which = "" if len(over) == len(comparisons) else f" on {', '.join(over)}"
    most = whole_percent(most_unseen(comparisons[0].decision.primary.blocks))
    return (
        f"{found} The verdict{which} is about others like them, as far as these are a sample of such blocks. "
        f"What happens in none of these blocks, such as a collapse, is no part of it: up to {most} of "
        "others may have it (95%, Clopper and Pearson)."
    )


def _contents(assessment: Assessment) -> Table:
    rows = []
    for label, block in assessment.sweep.plan.grid.blocks.items():
        values = {key: json.dumps(value, ensure_ascii=False) for key, value in block.overrides.items()}
        rows.append((label, "; ".join(f"{key} = {text}" for key, text in {**values, **block.inputs}.items())))
    return Table(
        "What the runs of each block share: configuration keys with their values, or with the stage whose "
        "checkpoint they receive.",
        ("Block", "Shares"),
        rows,
    )
