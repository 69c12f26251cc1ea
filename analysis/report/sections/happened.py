"""Descriptive results: the start, and each arm at each beta with its difference to the control."""

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
    tables = [_means(outcomes, keys)]
    if others:
        tables.append(_differences(others, keys, control))
    return Section(
        "happened",
        "Results of each arm",
        paragraphs=[f"The runs start at {values}."] if values else (),
        tables=tables,
    )


def _means(outcomes: list[ArmOutcome], keys: list[str]) -> Table:
    return Table(
        "Each arm at each β after training: mean with its 95% t interval over replicates, without diverged "
        "runs.",
        ("Arm", "β", "Runs", *(_NAMES[key] for key in keys)),
        [
            (
                outcome.label,
                f"{outcome.beta:g}",
                str(outcome.n) + (f" ({outcome.diverged} diverged)" if outcome.diverged else ""),
                *(with_ends(number(mean.value), mean) for mean in (outcome.means[key] for key in keys)),
            )
            for outcome in outcomes
        ],
    )


def _differences(outcomes: list[ArmOutcome], keys: list[str], control: str) -> Table:
    return Table(
        f"Matched differences to {control}: mean with its 95% t interval over replicates, not corrected for "
        "multiple comparisons, and the number of matched pairs in which the arm has the higher value.",
        ("Arm", "β", *(_NAMES[key] for key in keys)),
        [
            (
                outcome.label,
                f"{outcome.beta:g}",
                *(
                    f"{with_ends(signed(outcome.differences[key].value), outcome.differences[key])}; "
                    f"higher in {outcome.higher[key]} of {outcome.pairs}"
                    for key in keys
                ),
            )
            for outcome in outcomes
        ],
    )
