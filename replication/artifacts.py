"""The artifacts of studies of enumerated models, checked and converted to arrays."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from analysis.results.artifacts import FloatArray, array
from analysis.results.store import MALFORMED, DamagedFileError
from analysis.results.sweep import Sweep
from replication import schema

Artifact = TypeVar("Artifact")

OFF_POLICY_TERMS = ("kl", "objective")


@dataclass(frozen=True, eq=False)
class TabularGradient:
    """An estimator's gradient of the KL on pairs of random models, exactly.

    Attributes:
        bias: Distance of its expectation from the gradient of the KL, over the norm of the latter, shape [n].
        noise: Root of its variance for one pair of completions, over the same norm, shape [n].
        cosine: Cosine of its expectation with the gradient of KL(policy || reference), shape [n]; NaN where
            the expectation is zero.
        reverse_cosine: The same with the gradient of KL(reference || policy).
    """

    bias: FloatArray
    noise: FloatArray
    cosine: FloatArray
    reverse_cosine: FloatArray


@dataclass(frozen=True, eq=False)
class TabularStudy:
    """The artifact of `PitfallsStudy`.

    Attributes:
        beta: Weight of the KL in the descent on the objective.
        steps: The recorded steps of gradient descent.
        gradients: Estimator -> its gradients.
        forward: Estimator -> KL(policy || reference) in descent on the KL, shape [runs, steps]; "analytic" is
            descent with the exact gradient.
        reverse: Estimator -> KL(reference || policy) of the same runs.
        to_optimum: Estimator -> KL(policy || optimum) in descent on the objective, shape [runs, steps].
    """

    beta: float
    steps: list[int]
    gradients: dict[str, TabularGradient]
    forward: dict[str, FloatArray]
    reverse: dict[str, FloatArray]
    to_optimum: dict[str, FloatArray]


@dataclass(frozen=True, eq=False)
class OffPolicyMoments:
    """A gradient after inner steps, relative to the norm of the exact one, shape [policies, steps] each."""

    bias: FloatArray
    noise: FloatArray


@dataclass(frozen=True, eq=False)
class OffPolicyArtifact:
    """The artifact of `OffPolicyStudy`.

    Attributes:
        beta: Weight of the KL in the objective.
        steps: Inner steps taken.
        moved: KL of the current policy to that of the rollout, in nats, shape [policies, steps].
        moments: Estimator -> correction -> "kl" or "objective" -> its moments.
    """

    beta: float
    steps: list[int]
    moved: FloatArray
    moments: dict[str, dict[str, dict[str, OffPolicyMoments]]]


@dataclass(frozen=True, eq=False)
class DistillationCell:
    """A point of the map: whether the student can match the teacher, its initial distance, and the batch."""

    capacity: str
    distance: float
    batch: int

    def __str__(self) -> str:
        return f"{self.capacity}, distance {self.distance:g}, batch {self.batch}"


@dataclass(frozen=True, eq=False)
class DistillationArtifact:
    """The artifact of `DistillationStudy`.

    Attributes:
        steps: Steps of each run.
        learning_rates: The rates.
        selection: Number of runs, the first, on which rates are chosen.
        cells: The points of the map.
        start: KL before the first step, in nats per completion, shape [cells, runs].
        finals: Arm -> KL after the last, shape [cells, rates, runs].
    """

    steps: int
    learning_rates: list[float]
    selection: int
    cells: list[DistillationCell]
    start: FloatArray
    finals: dict[str, FloatArray]


def first_artifact(sweep: Sweep, study: str, read: Callable[[dict[str, Any]], Artifact]) -> Artifact | None:
    """The artifact of a study in a sweep, the first one if there are several; None if there is none.

    Args:
        sweep: The sweep.
        study: The study's name.
        read: Reads its artifacts.

    Raises:
        DamagedFileError: If it does not have the study's format.
    """
    for run in sweep.runs:
        if study in run.other_studies:
            try:
                return read(run.other_studies[study])
            except MALFORMED as error:
                raise DamagedFileError(f"{run.cell.id}: not an artifact of {study} ({error!r})") from error
    return None


def read_pitfalls(artifact: dict[str, Any]) -> TabularStudy:
    """Read the artifact of `PitfallsStudy`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If it does not have the format.
    """
    steps = [int(step) for step in artifact["steps"]]
    if len(steps) < 2 or sorted(set(steps)) != steps:
        raise ValueError(f"steps {steps}, expected at least two, increasing")
    if not artifact["gradients"]:
        raise ValueError("gradients of no estimator")
    first, *_ = artifact["gradients"].values()
    models, runs = len(first["bias"]), len(artifact["kl"][schema.ANALYTIC]["forward"])
    if models < 2 or runs < 2:
        raise ValueError(f"{models} models and {runs} runs, expected at least two of each")

    def gradient(content: dict[str, Any]) -> TabularGradient:
        cosines = (
            [math.nan if c is None else c for c in content[f"{which}cosine"]] for which in ("", "reverse_")
        )
        return TabularGradient(
            array(content["bias"], (models,), "bias"),
            array(content["noise"], (models,), "noise"),
            *(array(values, (models,), "cosine", finite=False) for values in cosines),
        )

    def curves(part: str, distance: str) -> dict[str, FloatArray]:
        shape = runs, len(steps)
        return {name: array(found[distance], shape, distance) for name, found in artifact[part].items()}

    names = {schema.ANALYTIC, *artifact["gradients"]}
    if not artifact["kl"].keys() == artifact["objective"].keys() == names:
        raise ValueError("parts with different estimators")
    return TabularStudy(
        float(artifact["beta"]),
        steps,
        {name: gradient(content) for name, content in artifact["gradients"].items()},
        curves("kl", "forward"),
        curves("kl", "reverse"),
        curves("objective", "to_optimum"),
    )


def read_off_policy(content: dict[str, Any]) -> OffPolicyArtifact:
    """Read the artifact of `OffPolicyStudy`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If it does not have the format.
    """
    steps = [int(step) for step in content["steps"]]
    if len(steps) < 2 or steps != list(range(len(steps))):
        raise ValueError(f"steps {steps}, expected 0, 1, ...")
    policies = len(content["moved"])
    shape = policies, len(steps)
    if policies < 2 or not content["moments"]:
        raise ValueError(f"{policies} policies and moments of {list(content['moments'])}")
    moments = {
        str(name): {
            str(correction): {
                term: OffPolicyMoments(
                    array(by_term[term]["bias"], shape, "bias"), array(by_term[term]["noise"], shape, "noise")
                )
                for term in OFF_POLICY_TERMS
            }
            for correction, by_term in by_correction.items()
        }
        for name, by_correction in content["moments"].items()
    }
    return OffPolicyArtifact(float(content["beta"]), steps, array(content["moved"], shape, "moved"), moments)


def read_distillation(content: dict[str, Any]) -> DistillationArtifact:
    """Read the artifact of `DistillationStudy`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If it does not have the format.
    """
    cells = [
        DistillationCell(str(one["capacity"]), float(one["distance"]), int(one["batch"]))
        for one in content["cells"]
    ]
    rates = [float(rate) for rate in content["learning_rates"]]
    selection, evaluation = int(content["selection"]), int(content["evaluation"])
    if min(selection, evaluation) < 2 or not rates or not cells:
        raise ValueError(f"{selection} and {evaluation} runs, {len(rates)} rates, {len(cells)} cells")
    runs = selection + evaluation
    finals = {
        str(arm): array(values, (len(cells), len(rates), runs), "finals")
        for arm, values in content["finals"].items()
    }
    if schema.ANALYTIC not in finals or len(finals) < 3 or min(np.min(v) for v in finals.values()) < -1e-6:
        raise ValueError(f"finals of {list(finals)}, expected KLs of analytic and two arms or more")
    start = array(content["start"], (len(cells), runs), "start")
    return DistillationArtifact(int(content["steps"]), rates, selection, cells, start, finals)
