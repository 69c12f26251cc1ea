"""The artifacts of studies in a run's result, checked and converted to arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_klrb import schema

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ValueSnapshot:
    """The estimates of the KL at one snapshot.

    Attributes:
        step: Number of completed optimizer steps.
        values: Estimator -> one value per completion, shape [P, N].
        horvitz_thompson: M -> one value per M completions, shape [P, N / M].
    """

    step: int
    values: dict[str, FloatArray]
    horvitz_thompson: dict[int, FloatArray]


@dataclass(frozen=True, eq=False)
class ValueStudy:
    """The artifact of `EstimationStudy`: P prompts with N completions each, in groups of M."""

    prompts: int
    completions: int
    group_sizes: list[int]
    snapshots: list[ValueSnapshot]


@dataclass(frozen=True, eq=False)
class GradientSnapshot:
    """The gradients at one snapshot.

    Attributes:
        step: Number of completed optimizer steps.
        beta: The weight of the KL.
        completions: Completions per prompt.
        gram: Inner products of the gradients of B batches, shape [(1 + E) B, (1 + E) B]: of the reward, then
            of the objective under each of E estimators.
    """

    step: int
    beta: float
    completions: int
    gram: FloatArray


@dataclass(frozen=True, eq=False)
class GradientStudy:
    """The artifact of `GradientNoiseStudy`."""

    estimators: list[str]
    batches: int
    prompts: int
    snapshots: list[GradientSnapshot]


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


Study = ValueStudy | GradientStudy | TabularStudy


def read_studies(artifacts: Mapping[str, Any]) -> tuple[Study, ...]:
    """Read the artifacts of a result; those of unknown studies are ignored.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If an artifact does not have its study's format.
    """
    readers: dict[str, Callable[[Any], Study]] = {
        schema.ESTIMATION: _value_study,
        schema.GRADIENT_NOISE: _gradient_study,
        schema.PITFALLS: _tabular_study,
    }
    return tuple(readers[name](artifact) for name, artifact in artifacts.items() if name in readers)


def _value_study(artifact: dict[str, Any]) -> ValueStudy:
    prompts, completions = _count(artifact, "prompts", 2), _count(artifact, "completions", 2)
    sizes = [int(size) for size in artifact["group_sizes"]]
    if not sizes or any(size < 1 or completions % size for size in sizes):
        raise ValueError(f"group_sizes {sizes} of {completions} completions")

    def snapshot(content: dict[str, Any]) -> ValueSnapshot:
        values = {
            name: _array(value, (prompts, completions), name) for name, value in content["values"].items()
        }
        by_size = content["horvitz_thompson"]
        if not {"k1", "rb"} <= values.keys():
            raise ValueError("values lack k1 or rb")
        return ValueSnapshot(
            int(content["step"]),
            values,
            {size: _array(by_size[str(size)], (prompts, completions // size), "ht") for size in sizes},
        )

    snapshots = [snapshot(content) for content in _snapshots(artifact)]
    _check_steps(snapshots)
    if any(one.values.keys() != snapshots[0].values.keys() for one in snapshots):
        raise ValueError("snapshots with different estimators")
    return ValueStudy(prompts, completions, sizes, snapshots)


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
            gram[index, : index + 1] = gram[: index + 1, index] = _array(row, (index + 1,), "gram")
        completions = _count(content, "completions", 1)
        return GradientSnapshot(int(content["step"]), float(content["beta"]), completions, gram)

    snapshots = [snapshot(content) for content in _snapshots(artifact)]
    _check_steps(snapshots)
    return GradientStudy(estimators, batches, _count(artifact, "prompts", 1), snapshots)


def _tabular_study(artifact: dict[str, Any]) -> TabularStudy:
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
            _array(content["bias"], (models,), "bias"),
            _array(content["noise"], (models,), "noise"),
            *(_array(values, (models,), "cosine", finite=False) for values in cosines),
        )

    def curves(part: str, distance: str) -> dict[str, FloatArray]:
        shape = runs, len(steps)
        return {name: _array(found[distance], shape, distance) for name, found in artifact[part].items()}

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


def _snapshots(artifact: Mapping[str, Any]) -> list[Any]:
    # Schema 1, of results that are still read, called them moments
    contents: list[Any] = artifact["moments" if artifact["schema"] == 1 else "snapshots"]
    return contents


def _count(content: Mapping[str, Any], key: str, least: int) -> int:
    value = content[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key} is {value!r}, expected an integer >= {least}")
    return value


def _array(values: Any, shape: tuple[int, ...], name: str, *, finite: bool = True) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.shape != shape or not (np.isfinite(array) | (not finite)).all():
        raise ValueError(f"{name} has shape {array.shape}, expected finite numbers of shape {shape}")
    return array


def _check_steps(snapshots: list[Any]) -> None:
    steps = [one.step for one in snapshots]
    if not steps or sorted(set(steps)) != steps:
        raise ValueError(f"snapshots at steps {steps}, expected at least one, increasing")
