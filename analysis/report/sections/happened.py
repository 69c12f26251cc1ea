"""Descriptive results: the start, and each arm at each beta with its difference to the control."""

from collections.abc import Callable
from functools import partial

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.stats.arms import OBJECTIVE, ArmOutcome, arm_outcomes, compared, start_of
from analysis.stats.intervals import Estimate
from analysis.stats.text import aligned, aligned_ends, decimals_of, number
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
    decimals = {key: decimals_of(arm.means[key].value for arm in outcomes) for key in keys}
    means = Table.of(
        "Each arm at each β after training: mean with its 95% t interval over replicates, without diverged "
        "runs.",
        outcomes,
        *_ARM,
        ("Runs", lambda arm: f"{arm.n} ({arm.diverged} diverged)" if arm.diverged else str(arm.n)),
        *((_NAMES[key], partial(_mean, key, decimals[key])) for key in keys),
    )
    differences = Table.of(
        f"Matched differences to {control}: mean with its 95% t interval over replicates, not corrected for "
        "multiple comparisons, and the number of matched pairs in which the arm has the higher value.",
        others,
        *_ARM,
        *((_NAMES[key], partial(_difference, key, decimals[key])) for key in keys),
    )
    return Section(
        "happened",
        "Results of each arm",
        paragraphs=[f"The runs start at {values}."] if values else (),
        tables=[means, differences] if others else [means],
    )


def _mean(key: str, decimals: int, arm: ArmOutcome) -> str:
    return _with_ends(arm.means[key], decimals)


def _difference(key: str, decimals: int, arm: ArmOutcome) -> str:
    mean = _with_ends(arm.differences[key], decimals, sign=True)
    return f"{mean}; higher in {arm.higher[key]} of {arm.pairs}"


def _with_ends(mean: Estimate, decimals: int, *, sign: bool = False) -> str:
    text, interval = aligned(mean.value, decimals, sign=sign), mean.interval()
    return text if interval is None else f"{text} ({aligned_ends(interval, decimals)})"
