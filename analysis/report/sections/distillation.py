"""On-policy distillation of enumerated models: the map of which credit for the KL wins where."""

from typing import Any

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.enumerated import DistillationArtifact
from analysis.stats.distillation import DistilledArm, distilled_arms, regret
from analysis.stats.text import number

CONTROL = "whole future, exact"


def distillation(assessment: Assessment) -> Section | None:
    """Final KL of every arm at each point of the map, from the artifact of `DistillationStudy`."""
    found = assessment.sweep.study(DistillationArtifact)
    if found is None:
        return None
    _, artifact = found
    control = CONTROL if CONTROL in artifact.finals else next(iter(artifact.finals))
    arms = distilled_arms(artifact, control)
    regrets = regret(arms)
    runs = artifact.start.shape[1] - artifact.selection
    rates = ", ".join(f"{rate:g}" for rate in artifact.learning_rates)
    return Section(
        "distillation",
        "On-policy distillation, enumerated",
        paragraphs=[
            f"Exact KL(student‖teacher) after {artifact.steps} Adam steps, of {runs} runs with random "
            f"teachers and students (n counts runs). Each arm is at its own best rate of {rates}, chosen on "
            f"{artifact.selection} other runs. A student of limited capacity cannot match its teacher.",
        ],
        tables=[_means(artifact, arms, regrets), _ratios(artifact, arms, control)],
        numbers={arm: _numbers(one, regrets.get(arm)) for arm, one in arms.items()},
        exploratory=True,
    )


def _means(
    artifact: DistillationArtifact, arms: dict[str, list[DistilledArm]], regrets: dict[str, float]
) -> Table:
    ordered = sorted(arms, key=lambda arm: regrets.get(arm, 0.0))
    rows = [("start", *(number(float(kl.mean())) for kl in artifact.start), "–")]
    for arm in ordered:
        rows.append((arm, *map(_mean, arms[arm]), number(regrets[arm]) if arm in regrets else "–"))
    return Table(
        "Final KL in nats per completion, mean over runs ± standard error. * the best rate is the smallest "
        "or largest tried. Worst ratio: the largest ratio, over the columns, of the geometric mean KL to "
        "that of the column's best arm; the arm with the smallest comes first.",
        ("Arm", *map(str, artifact.cells), "Worst ratio"),
        rows,
    )


def _mean(arm: DistilledArm) -> str:
    mean = f"{number(arm.mean.value)} ± {number(arm.mean.standard_error, 2)}"
    return f"{mean}*" if arm.at_edge else mean


def _ratios(artifact: DistillationArtifact, arms: dict[str, list[DistilledArm]], control: str) -> Table:
    return Table(
        f"Log of the KL over that of “{control}”, mean over runs: below 0 is nearer to the teacher. p of "
        "paired t-tests with Holm's correction over the whole table.",
        ("Arm", *map(str, artifact.cells)),
        [
            (arm, *(f"{number(one.log_ratio.value)} (p = {number(one.p_holm, 2)})" for one in found))
            for arm, found in arms.items()
            if found[0].p == found[0].p  # not NaN: neither the control nor the exact gradient
        ],
    )


def _numbers(found: list[DistilledArm], worst: float | None) -> dict[str, Any]:
    return {
        "rates": [one.rate for one in found],
        "kl": [one.mean.value for one in found],
        "standard_error": [one.mean.standard_error for one in found],
        "log_ratio": [one.log_ratio.value for one in found],
        "p_holm": [one.p_holm for one in found],
        "worst_ratio": worst,
    }
