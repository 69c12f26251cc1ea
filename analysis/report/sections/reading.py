"""How to read the page: the verdicts in full, what the tests assume, and the terms."""

from analysis.report.assessment import Assessment
from analysis.report.elements import Section
from analysis.report.sections.summary import sentences
from analysis.stats.text import count, percent

GLOSSARY = (
    ("KL", "the divergence of a trained policy from its reference, in nats per completion"),
    ("β", "the weight of the KL, in reward per nat: each run maximises J = reward − β·KL at its own β"),
    (
        "Estimator",
        "the estimator of the KL's gradient in training; all runs are evaluated in the same way, on the same "
        "prompts and seeds",
    ),
    (
        "Matched pair",
        "two runs with the same β, replicate and seed that differ in what the plan gives their arms: the "
        "estimator, and often the learning rate",
    ),
    ("Reward at matched KL", "the difference in reward between two arms at the same KL"),
    (
        "Simultaneous interval",
        "an interval of all differences that the corrected test does not reject; all intervals of a family "
        "are valid together",
    ),
    ("Replicate", "one repetition of the whole grid with its own seeds; n counts replicates"),
    (
        "Swap p-value",
        "the probability of a difference at least as large if the estimators' names are exchanged at random "
        "within matched pairs",
    ),
)


def reading(assessment: Assessment) -> Section:
    """The terms of the page, and the sentences behind a verdict on several arms."""
    comparisons = () if assessment.withheld else assessment.comparisons
    return Section(
        "reading",
        "How to read this page",
        notes=[
            *(sentence for one in comparisons for sentence in sentences(one) if len(comparisons) > 1),
            *([_inference(assessment)] if comparisons else []),
        ],
        glossary=GLOSSARY,
    )


def _inference(assessment: Assessment) -> str:
    primary, planned = assessment.comparisons[0].decision.primary, len(assessment.sweep.plan.comparisons)
    seeds_shared = assessment.comparisons[0].pairs.seeds_shared
    swaps = "whole replicates, because seeds are shared across β" if seeds_shared else "single pairs"
    over_blocks = "Mean differences are tested over blocks, whose number is n. Apart from these, "
    return (over_blocks if primary.over_blocks else "") + (
        f"n counts replicates. The exact tests swap the labels of two arms within {swaps}; their null "
        f"hypothesis is that the outcomes of both arms are exchangeable. The primary outcome is "
        f"{primary.claim.subject}, with Bonferroni's correction over {count(planned, 'planned comparison')}. "
        f"Intervals are simultaneous, {percent(1 - primary.level)} each: all differences that the corrected "
        f"test does not reject at {primary.alpha:g}. All other tests are descriptive."
    )
