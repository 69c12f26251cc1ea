"""The artifacts of studies in a run's result, checked and converted to arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from analysis.results.arrays import FloatArray as FloatArray, array
from lit_klrb import schema


@dataclass(frozen=True, eq=False)
class ValueSnapshot:
    """The estimates of the KL at one snapshot.

    Attributes:
        step: Number of completed optimizer steps.
        values: Estimator -> one value per completion, shape [P, N].
        horvitz_thompson: M -> one value per M completions, shape [P, N / M].
        label: Its name.
        standard: The KL of each prompt from elsewhere, shape [P]: exact, or from an independent sample.
        standard_error: The standard errors of that sample, shape [P]; zeros if exact.
        reference_mass: Mean of q(y) / p(y) over the completions of each prompt, shape [P].
        seconds: Seconds of sampling, and of each estimate.
    """

    step: int
    values: dict[str, FloatArray]
    horvitz_thompson: dict[int, FloatArray]
    label: str
    standard: FloatArray | None = None
    standard_error: FloatArray | None = None
    reference_mass: FloatArray | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the KL of each prompt is known exactly."""
        return self.standard_error is not None and not self.standard_error.any()


@dataclass(frozen=True, eq=False)
class ValueStudy:
    """The artifact of `EstimationStudy` or `PairEstimationStudy`.

    Attributes:
        prompts: Number of prompts (P).
        completions: Completions per prompt (N).
        group_sizes: Completions per estimate (M).
        snapshots: The estimates.
        tolerance: Largest bias that is regarded as none, as a fraction of the KL.
        stratum: Number of completions that share one random shift; 1 for independent completions.
    """

    prompts: int
    completions: int
    group_sizes: list[int]
    snapshots: list[ValueSnapshot]
    tolerance: float = 0.01
    stratum: int = 1


# The gradients of which variances are recorded by layer.
LAYER_TERMS = ("kl", "total")


@dataclass(frozen=True, eq=False)
class GradientSnapshot:
    """The gradients at one snapshot.

    Attributes:
        step: Number of completed optimizer steps.
        beta: The weight of the KL.
        completions: Completions per prompt.
        gram: Inner products of the gradients of B batches, shape [(1 + E) B, (1 + E) B]: of the reward, then
            of the objective under each of E estimators.
        label: Its name.
        layers: Layer -> "kl" or "total" -> half the squared distances between the gradients of disjoint pairs
            of batches, shape [E, B / 2]; empty if they were not recorded.
    """

    step: int
    beta: float
    completions: int
    gram: FloatArray
    label: str = ""
    layers: dict[str, dict[str, FloatArray]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GradientStudy:
    """The artifact of `GradientNoiseStudy`."""

    estimators: list[str]
    batches: int
    prompts: int
    snapshots: list[GradientSnapshot]


Study = ValueStudy | GradientStudy
Snapshot = TypeVar("Snapshot", ValueSnapshot, GradientSnapshot)


def read_studies(artifacts: Mapping[str, Any]) -> tuple[Study, ...]:
    """Read the artifacts of a result; those of unknown studies are ignored.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If an artifact does not have its study's format.
    """
    return tuple(_READERS[name](artifact) for name, artifact in artifacts.items() if name in _READERS)


def unknown_studies(artifacts: Mapping[str, Any]) -> dict[str, Any]:
    """The artifacts of a result that `read_studies` ignores."""
    return {name: artifact for name, artifact in artifacts.items() if name not in _READERS}


def _value_study(artifact: dict[str, Any]) -> ValueStudy:
    prompts, completions = _count(artifact, "prompts", 2), _count(artifact, "completions", 2)
    sizes = [int(size) for size in artifact["group_sizes"]]
    if not sizes or any(size < 1 or completions % size for size in sizes):
        raise ValueError(f"group_sizes {sizes} of {completions} completions")

    def snapshot(content: dict[str, Any]) -> ValueSnapshot:
        values = {
            name: array(value, (prompts, completions), name) for name, value in content["values"].items()
        }
        by_size = content["horvitz_thompson"]
        if not {"k1", "rb"} <= values.keys():
            raise ValueError("values lack k1 or rb")
        return ValueSnapshot(
            int(content["step"]),
            values,
            {size: array(by_size[str(size)], (prompts, completions // size), "ht") for size in sizes},
            str(content.get("label", f"step {int(content['step'])}")),
            *_standard(content, prompts),
            _optional(content, "reference_mass", prompts),
            {str(name): float(value) for name, value in content.get("seconds", {}).items()},
        )

    snapshots = _snapshots(artifact, snapshot)
    if any(one.values.keys() != snapshots[0].values.keys() for one in snapshots):
        raise ValueError("snapshots with different estimators")
    tolerance, stratum = float(artifact.get("tolerance", 0.01)), int(artifact.get("stratum", 1))
    if not 0 < tolerance < 1 or stratum not in (1, *sizes):
        raise ValueError(f"tolerance {tolerance} and stratum {stratum}")
    return ValueStudy(prompts, completions, sizes, snapshots, tolerance, stratum)


def _standard(content: Mapping[str, Any], prompts: int) -> tuple[FloatArray | None, FloatArray | None]:
    """The KL of each prompt, exact or from an independent sample, and its standard errors."""
    exact = _optional(content, "exact", prompts)
    if exact is not None:
        return exact, np.zeros(prompts)
    sample = content.get("independent", {})
    return _optional(sample, "mean", prompts), _optional(sample, "standard_error", prompts)


def _optional(content: Mapping[str, Any], key: str, prompts: int) -> FloatArray | None:
    return array(content[key], (prompts,), key) if key in content else None


def _gradient_study(artifact: dict[str, Any]) -> GradientStudy:
    estimators, batches = [str(name) for name in artifact["estimators"]], _count(artifact, "batches", 4)
    if not estimators or len(set(estimators)) < len(estimators):
        raise ValueError(f"estimators {estimators}")
    side = (1 + len(estimators)) * batches

    def snapshot(content: dict[str, Any]) -> GradientSnapshot:
        gram = np.zeros((side, side))
        if len(content["gram"]) != side:
            raise ValueError(f"a Gram matrix of {len(content['gram'])} rows, expected {side}")
        for index, row in enumerate(content["gram"]):
            gram[index, : index + 1] = gram[: index + 1, index] = array(row, (index + 1,), "gram")
        completions, shape = _count(content, "completions", 1), (len(estimators), batches // 2)
        layers = {
            str(layer): {term: array(by_term[term], shape, layer) for term in LAYER_TERMS}
            for layer, by_term in content.get("layers", {}).items()
        }
        step = int(content["step"])
        label = str(content.get("label", f"step {step}"))
        return GradientSnapshot(step, float(content["beta"]), completions, gram, label, layers)

    snapshots = _snapshots(artifact, snapshot)
    return GradientStudy(estimators, batches, _count(artifact, "prompts", 1), snapshots)


def _snapshots(artifact: Mapping[str, Any], read: Callable[[Any], Snapshot]) -> list[Snapshot]:
    # Schema 1, of results that are still read, called them moments
    found = [read(content) for content in artifact["moments" if artifact["schema"] == 1 else "snapshots"]]
    steps = [one.step for one in found]
    if not steps or sorted(set(steps)) != steps:
        raise ValueError(f"snapshots at steps {steps}, expected at least one, increasing")
    return found


def _count(content: Mapping[str, Any], key: str, least: int) -> int:
    value = content[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key} is {value!r}, expected an integer >= {least}")
    return value


_READERS: dict[str, Callable[[Any], Study]] = {
    schema.ESTIMATION: _value_study,
    schema.GRADIENT_NOISE: _gradient_study,
}
