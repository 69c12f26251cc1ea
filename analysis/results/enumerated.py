"""The artifacts of studies of enumerated models, checked and converted to arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.results.arrays import FloatArray, array
from lit_klrb import schema

OFF_POLICY_TERMS = ("kl", "objective")


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
