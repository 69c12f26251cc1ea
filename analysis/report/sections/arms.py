"""What was compared: each arm's settings, and what its gradient optimises."""

import json

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.sweep import Sweep


def arms(assessment: Assessment) -> Section | None:
    """A row for each arm; None for a sweep that does not say what its arms optimise."""
    sweep = assessment.sweep
    if not any(arm.optimises for arm in sweep.arms.values()):
        return None
    overrides = sweep.plan.grid.arms
    rows = [
        (
            label,
            "; ".join(f"{key} = {_value(value)}" for key, value in overrides[label].items()) or "nothing",
            f"{arm.estimator or 'none'}{' (biased)' if arm.biased else ''}",
            arm.optimises or "–",
        )
        for label, arm in sweep.arms.items()
    ]
    return Section(
        "arms",
        "What was compared",
        paragraphs=biased_arms(sweep),
        tables=[
            Table(
                "The arms. Beside what is listed here, their runs differ in nothing but β and seed. What a "
                "gradient optimises is its expectation on the policy's own samples.",
                ("Arm", "Changes", "Estimator of the KL", "Its gradient optimises"),
                rows,
            )
        ],
        numbers={
            label: {"overrides": overrides[label], "estimator": arm.estimator, "optimises": arm.optimises}
            | {"biased": arm.biased}
            for label, arm in sweep.arms.items()
        },
    )


def biased_arms(sweep: Sweep) -> list[str]:
    """A sentence on the arms that do not train for the KL that they are scored by."""
    found = [f"{label} ({arm.estimator})" for label, arm in sweep.arms.items() if arm.biased]
    if not found:
        return []
    verb, their = ("is", "its gradient is") if len(found) == 1 else ("are", "their gradients are")
    return [
        f"{', '.join(found)} {verb} biased: {their} not that of reward − β·KL(policy‖reference), by which "
        "all arms are scored."
    ]


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
