"""The sections of the report, in order. A builder returns None if its section has no content."""

from collections.abc import Callable, Sequence

from analysis.report.assessment import Assessment
from analysis.report.elements import Section
from analysis.report.sections.arms import arms
from analysis.report.sections.blocks import blocks
from analysis.report.sections.certificates import certificates
from analysis.report.sections.completions import completions
from analysis.report.sections.curves import training_curves
from analysis.report.sections.evaluation_noise import evaluation_noise
from analysis.report.sections.execution import execution
from analysis.report.sections.gradient_noise import gradient_noise
from analysis.report.sections.happened import happened
from analysis.report.sections.hyperparameters import hyperparameters
from analysis.report.sections.kl_values import estimation
from analysis.report.sections.outcomes import outcomes
from analysis.report.sections.provenance import provenance
from analysis.report.sections.reading import reading
from analysis.report.sections.stability import stability
from analysis.report.sections.summary import summary
from analysis.report.sections.tradeoff import tradeoff
from analysis.report.sections.tuning import tuning
from lit_klrb.extensions import extensions, load

Builder = Callable[[Assessment], Section | None]

# The entry points of other packages that add sections.
ADDED = "lit_klrb.report_sections"

# What each part of the page has, in order; the last part is folded.
PARTS: dict[str, tuple[Builder, ...]] = {
    "Answer": (summary, tradeoff, happened),
    "Runs": (completions, training_curves, arms, tuning, blocks),
    "Checks": (execution, outcomes, evaluation_noise, stability, gradient_noise, estimation, certificates),
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
    found = {}
    for part, own in PARTS.items():
        builders = own or added
        sections = [section for builder in builders if (section := builder(assessment)) is not None]
        if sections:
            found[part] = sections
    return found
