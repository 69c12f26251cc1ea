"""Bias and noise of off-policy corrections over inner steps."""

from collections.abc import Iterator

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.artifacts import FloatArray
from analysis.stats.intervals import Estimate
from analysis.stats.text import number
from replication import schema
from replication.artifacts import OFF_POLICY_TERMS, OffPolicyArtifact, first_artifact, read_off_policy

# Relative distances from the exact gradient up to this are rounding.
ROUNDING = 1e-6
_TITLES = {"kl": "the KL", "objective": "the whole objective"}


def off_policy(assessment: Assessment) -> Section | None:
    """Bias and noise of each correction, from the artifact of `OffPolicyStudy`."""
    artifact = first_artifact(assessment.sweep, schema.OFF_POLICY, read_off_policy)
    if artifact is None:
        return None
    moved = ", ".join(number(float(kl), 2) for kl in artifact.moved.mean(axis=0))
    return Section(
        "off_policy",
        "Off-policy corrections, exactly",
        paragraphs=[
            "Gradients from two completions of the policy that sampled them, after inner steps that moved "
            f"the current policy; mean over {len(artifact.moved)} random models so small that all pairs of "
            f"completions are enumerated (n counts models). KL of the current policy to the first, over the "
            f"steps: {moved} nats. Sizes depend on these toys; that a bias is zero or not does not.",
        ],
        tables=[_table(artifact, term) for term in OFF_POLICY_TERMS],
        numbers={
            f"{name} {correction} {term}": {
                "bias": moments.bias.mean(axis=0).tolist(),
                "noise": moments.noise.mean(axis=0).tolist(),
            }
            for name, by_correction in artifact.moments.items()
            for correction, by_term in by_correction.items()
            for term, moments in by_term.items()
        },
        exploratory=True,
    )


def shown_steps(artifact: OffPolicyArtifact) -> list[int]:
    """Powers of two among the steps, and the last."""
    last = artifact.steps[-1]
    return [0, *(step for step in artifact.steps if step and not step & (step - 1) and step < last), last]


def _table(artifact: OffPolicyArtifact, term: str) -> Table:
    steps = shown_steps(artifact)

    def rows() -> Iterator[tuple[str, ...]]:
        for name, by_correction in artifact.moments.items():
            for correction, by_term in by_correction.items():
                moments = by_term[term]
                cells = [f"{_mean(moments.bias, step)} / {_mean(moments.noise, step)}" for step in steps]
                yield name, correction, *cells

    return Table(
        f"Gradient of {_TITLES[term]} (β = {artifact.beta:g}): bias / noise after inner steps. Bias: "
        "distance of the expectation from the exact gradient at the current policy; noise: root of the "
        "variance; both over the norm of the exact gradient.",
        ("Estimator", "Correction", *(f"{step} steps" for step in steps)),
        list(rows()),
    )


def _mean(values: FloatArray, step: int) -> str:
    column = values[:, step]
    return "0" if column.max() < ROUNDING else number(Estimate.of_mean(column).value)
