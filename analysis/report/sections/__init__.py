"""The sections of the report, in order. A builder returns None if its section has no content."""

from collections.abc import Callable

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

Builder = Callable[[Assessment], Section | None]

SECTIONS: tuple[Builder, ...] = (
    summary,
    tradeoff,
    happened,
    reading,
    arms,
    tuning,
    execution,
    completions,
    hyperparameters,
    outcomes,
    blocks,
    evaluation_noise,
    training_curves,
    stability,
    gradient_noise,
    estimation,
    certificates,
    provenance,
)
