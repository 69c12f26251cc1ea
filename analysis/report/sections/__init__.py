"""The sections of the report, in order. A builder returns None if its section has no content."""

from collections.abc import Callable, Sequence

from analysis.report.assessment import Assessment
from analysis.report.elements import Section
from analysis.report.sections.gradient_noise import gradient_noise
from analysis.report.sections.kl_values import estimation
from analysis.report.sections.outcomes import outcomes
from analysis.report.sections.runs import arms, blocks, completions, hyperparameters, provenance, reading
from analysis.report.sections.summary import execution, summary
from analysis.report.sections.tradeoff import arm_results, tradeoff
from analysis.report.sections.training import training_curves, tuning
from lit_klrb.extensions import extensions, load

Builder = Callable[[Assessment], Section | None]

# The entry points of other packages that add sections.
ADDED = "lit_klrb.report_sections"

# What each part of the page has, in order; the last part is folded.
PARTS: dict[str, tuple[Builder, ...]] = {
    "Answer": (summary, tradeoff, arm_results),
    "Runs": (completions, training_curves, arms, tuning, blocks),
    "Checks": (execution, outcomes, gradient_noise, estimation),
    "More measurements": (),
    "Appendix": (reading, hyperparameters, provenance),
}


def added_sections() -> tuple[Builder, ...]:
    """The sections of installed packages, see docs/extending.md.

    Raises:
        ConfigurationError: If one cannot be imported.
    """
    return tuple(load(entry) for entry in extensions(ADDED).values())


def sections_of(assessment: Assessment, added: Sequence[Builder]) -> dict[str, list[Section]]:
    """The sections with content, by part of the page."""
    parts = {}
    for part, own in PARTS.items():
        builders = own or added
        sections = [section for builder in builders if (section := builder(assessment)) is not None]
        if sections:
            parts[part] = sections
    return parts
