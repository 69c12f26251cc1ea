"""The arms: the settings of each, and what its gradient optimises."""

import json
from collections.abc import Mapping

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.plan import by_beta
from analysis.results.sweep import Sweep


def arms(assessment: Assessment) -> Section | None:
    """One row per arm; None if it is not recorded what the arms optimise."""
    sweep = assessment.sweep
    if not any(arm.optimises for arm in sweep.arms.values()):
        return None
    overrides, betas = sweep.plan.grid.arms, sweep.plan.grid.beta
    rows = [
        (
            label,
            "; ".join(f"{key} = {_value(value, betas)}" for key, value in overrides[label].items())
            or "nothing",
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
                "The arms. Apart from these changes, their runs differ only in β and seed. The last column "
                "is what the gradient optimises in expectation, on samples of the current policy.",
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
    """A sentence on the arms whose gradient is biased; none without such arms."""
    found = [f"{label} ({arm.estimator})" for label, arm in sweep.arms.items() if arm.biased]
    if not found:
        return []
    verb, their = ("is", "its gradient is") if len(found) == 1 else ("are", "their gradients are")
    return [
        f"{', '.join(found)} {verb} biased: {their} not that of reward − β·KL(policy‖reference), by which "
        "all arms are scored."
    ]


def _value(value: object, betas: Mapping[int, float]) -> str:
    several = by_beta(value)
    if several is not None:
        return ", ".join(
            f"{_value(several[str(index)], {})} at β = {beta:g}" for index, beta in betas.items()
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
