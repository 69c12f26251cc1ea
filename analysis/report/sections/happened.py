"""Descriptive results: the start, and each arm at each beta with its difference to the control."""

from collections.abc import Callable
from functools import partial

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.arms import OBJECTIVE, ArmOutcome, arm_outcomes, compared, start_of
from analysis.stats.text import number, signed, with_ends
from lit_klrb import schema

_NAMES = {
    schema.KL: "KL (nats)",
    schema.REWARD: "Reward",
    OBJECTIVE: "J = reward − β·KL",
    schema.LENGTH: "Length (tokens)",
}

# The first columns of both tables.
_ARM: tuple[tuple[str, Callable[[ArmOutcome], str]], ...] = (
    ("Arm", lambda arm: arm.label),
    ("β", lambda arm: f"{arm.beta:g}"),
)


def happened(assessment: Assessment) -> Section | None:
    """Means with intervals over replicates, and matched differences."""
    sweep = assessment.sweep
    # Arms at the same beta are next to each other, as these can be compared
    betas = list(sweep.plan.grid.beta.values())
    keys = [key for key in _NAMES if key in compared(sweep)]
    outcomes = sorted(arm_outcomes(sweep, keys), key=lambda outcome: betas.index(outcome.beta))
    if not any(outcome.n for outcome in outcomes):
        return None
    control = sweep.plan.primary.control
    start = start_of(sweep)
    values = ", ".join(f"{_NAMES[key]} {number(start[key])}" for key in keys if start.get(key) is not None)
    others = [outcome for outcome in outcomes if outcome.label != control and outcome.pairs]
    means = Table.of(
        "Each arm at each β after training: mean with its 95% t interval over replicates, without diverged "
        "runs.",
        outcomes,
        *_ARM,
        ("Runs", lambda arm: f"{arm.n} ({arm.diverged} diverged)" if arm.diverged else str(arm.n)),
        *((_NAMES[key], partial(_mean, key)) for key in keys),
    )
    differences = Table.of(
        f"Matched differences to {control}: mean with its 95% t interval over replicates, not corrected for "
        "multiple comparisons, and the number of matched pairs in which the arm has the higher value.",
        others,
        *_ARM,
        *((_NAMES[key], partial(_difference, key)) for key in keys),
    )
    return Section(
        "happened",
        "Results of each arm",
        paragraphs=[f"The runs start at {values}."] if values else (),
        tables=[means, differences] if others else [means],
    )


def _mean(key: str, arm: ArmOutcome) -> str:
    return with_ends(number(arm.means[key].value), arm.means[key])


def _difference(key: str, arm: ArmOutcome) -> str:
    estimate = arm.differences[key]
    return f"{with_ends(signed(estimate.value), estimate)}; higher in {arm.higher[key]} of {arm.pairs}"
