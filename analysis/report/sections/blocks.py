"""The blocks: what each is, and which statements are over blocks."""

import json

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.contrast import block_means
from analysis.stats.primary import primary_contrast
from analysis.stats.text import these_blocks

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
    """Whether the verdicts are about other blocks, in a sentence; "" without blocks."""
    labels, comparisons = list(assessment.sweep.plan.grid.blocks), assessment.comparisons
    if not labels:
        return ""
    found = f"The replicates are of {len(labels)} blocks ({', '.join(labels)})."
    over = [
        comparison.pairs.treatment for comparison in comparisons if comparison.decision.primary.over_blocks
    ]
    if not over:
        return f"{found} All statements hold {these_blocks(comparisons[0].decision.primary.blocks)} only."
    which = "" if len(over) == len(comparisons) else f" on {', '.join(over)}"
    sample = "as far as these are a sample of such blocks"
    return f"{found} The verdict{which} is about others like them, {sample}."


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
