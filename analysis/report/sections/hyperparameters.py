"""The hyperparameters of the runs: those common to all, and those that differ between arms."""

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table

# Keys that differ between runs by design.
_DESIGNED = ("kl.beta", "data.seed")


def hyperparameters(assessment: Assessment) -> Section | None:
    """The hyperparameters that differ between arms; those common to all are initially collapsed."""
    by_arm: dict[str, dict[str, set[str]]] = {}
    for run in assessment.sweep.grid.values():
        found = by_arm.setdefault(run.point.arm, {})
        for key, value in run.settings.items():
            found.setdefault(key, set()).add(value)
    keys = sorted({key for found in by_arm.values() for key in found} - set(_DESIGNED))
    if not keys:
        return None
    arms = [arm for arm in assessment.sweep.plan.grid.arms if arm in by_arm]
    texts = {key: [", ".join(sorted(by_arm[arm].get(key, {"–"}))) for arm in arms] for key in keys}
    shared = [(key, values[0]) for key, values in texts.items() if len(set(values)) == 1]
    different = [(key, *values) for key, values in texts.items() if len(set(values)) > 1]
    return Section(
        "hyperparameters",
        "Hyperparameters",
        tables=[Table("Hyperparameters that differ between the arms.", ("Key", *arms), different)]
        if different
        else (),
        details=[Table("Hyperparameters common to all runs of the grid.", ("Key", "Value"), shared)]
        if shared
        else (),
        numbers={"shared": dict(shared), "different": {key: values for key, *values in different}},
    )
