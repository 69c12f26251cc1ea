"""The artifacts of studies in a run's result as types, their numbers as arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from lit_klrb import schema

FloatArray = npt.NDArray[np.float64]
# Numbers of an artifact, nested to any depth.
Numbers = Annotated[FloatArray, PlainValidator(lambda values: array(values, None, "an array"))]
# What a study writes beside what is read here is ignored.
_OPEN = ConfigDict(extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True)


def array(values: Any, shape: tuple[int, ...] | None, name: str, *, finite: bool = True) -> FloatArray:
    """Nested lists of numbers as an array; a ValueError names those of another shape or not finite."""
    result = np.array(values, dtype=np.float64)
    if shape not in (None, result.shape) or not (np.isfinite(result) | (not finite)).all():
        expected = "finite numbers" if shape is None else f"finite numbers of shape {shape}"
        raise ValueError(f"{name} has shape {result.shape}, expected {expected}")
    return result


def _triangle(rows: Any) -> FloatArray:
    """A symmetric matrix, of which row i has the first i + 1 numbers; or the whole."""
    if isinstance(rows, np.ndarray):
        return rows
    gram = np.zeros((len(rows), len(rows)))
    for index, row in enumerate(rows):
        gram[index, : index + 1] = gram[: index + 1, index] = array(row, (index + 1,), "gram")
    return gram


@dataclass(frozen=True, eq=False, config=_OPEN)
class ValueSnapshot:
    """The estimates of the KL at one snapshot."""

    step: StrictInt  # number of completed optimizer steps
    values: dict[str, Numbers]  # estimator -> one value per completion, shape [P, N]
    horvitz_thompson: dict[int, Numbers]  # M -> one value per M completions, shape [P, N / M]
    label: str
    # The KL of each prompt from elsewhere, shape [P]: exact, or from an independent sample
    standard: Numbers | None = None
    standard_error: Numbers | None = None  # the standard errors of that sample, shape [P]; zeros if exact
    # Mean of q(y) / p(y) over the completions of each prompt, shape [P]
    reference_mass: Numbers | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # seconds of sampling, and of each estimate


def _snapshot(content: Any) -> Any:
    """A snapshot with a label, and its standard from `exact`, or from `independent` with its error."""
    if not isinstance(content, Mapping):
        return content
    sample = dict(content.get("independent", {}))
    if "exact" in content:
        sample = {"mean": content["exact"], "standard_error": np.zeros(len(content["exact"]))}
    standard = {"standard": sample.get("mean"), "standard_error": sample.get("standard_error")}
    return {"label": f"step {content.get('step')}", **standard, **content}


@dataclass(frozen=True, eq=False, config=_OPEN)
class ValueStudy:
    """The artifact of `EstimationStudy` or `PairEstimationStudy`."""

    prompts: Annotated[int, Field(strict=True, ge=2)]  # number of prompts (P)
    completions: Annotated[int, Field(strict=True, ge=2)]  # completions per prompt (N)
    # Completions per estimate (M)
    group_sizes: Annotated[list[Annotated[int, Field(strict=True, ge=1)]], Field(min_length=1)]
    snapshots: Annotated[list[Annotated[ValueSnapshot, BeforeValidator(_snapshot)]], Field(min_length=1)]
    # Largest bias that is regarded as none, as a fraction of the KL
    tolerance: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.01

    def __post_init__(self) -> None:
        _check_steps(self.snapshots)
        if any(self.completions % size for size in self.group_sizes):
            raise ValueError(f"group_sizes {self.group_sizes} of {self.completions} completions")
        names = self.snapshots[0].values.keys()
        if not {"k1", "rb"} <= names or any(one.values.keys() != names for one in self.snapshots):
            raise ValueError(f"snapshots of {', '.join(names)}, expected all with k1, rb and the same others")
        for one in self.snapshots:
            for name, values in one.values.items():
                array(values, (self.prompts, self.completions), name)
            for size in self.group_sizes:
                shape = self.prompts, self.completions // size
                array(one.horvitz_thompson[size], shape, "horvitz_thompson")
            for each in (one.standard, one.standard_error, one.reference_mass):
                if each is not None:
                    array(each, (self.prompts,), "a value of each prompt")


@dataclass(frozen=True, eq=False, config=_OPEN)
class GradientSnapshot:
    """The gradients at one snapshot."""

    step: StrictInt  # number of completed optimizer steps
    beta: StrictFloat  # the weight of the KL
    completions: Annotated[int, Field(strict=True, ge=1)]  # completions per prompt
    # Inner products of the gradients of B batches, shape [(1 + E) B, (1 + E) B]: of the reward, then of the
    # objective under each of E estimators
    gram: Annotated[Numbers, BeforeValidator(_triangle)]
    label: str = ""


@dataclass(frozen=True, eq=False, config=_OPEN)
class GradientStudy:
    """The artifact of `GradientNoiseStudy`."""

    estimators: Annotated[list[str], Field(min_length=1)]
    batches: Annotated[int, Field(strict=True, ge=4)]
    prompts: Annotated[int, Field(strict=True, ge=1)]
    snapshots: Annotated[list[Annotated[GradientSnapshot, BeforeValidator(_snapshot)]], Field(min_length=1)]

    def __post_init__(self) -> None:
        _check_steps(self.snapshots)
        if len(set(self.estimators)) < len(self.estimators):
            raise ValueError(f"estimators {self.estimators}, expected different names")
        side = (1 + len(self.estimators)) * self.batches
        for one in self.snapshots:
            array(one.gram, (side, side), "gram")


Study = ValueStudy | GradientStudy
# Those of other studies are left as they are.
STUDIES: dict[str, Callable[..., Study]] = {
    schema.ESTIMATION: ValueStudy,
    schema.GRADIENT_NOISE: GradientStudy,
}


def read_studies(artifacts: Mapping[str, Any]) -> tuple[Study, ...]:
    """Read the artifacts of a result; those of unknown studies are ignored."""
    known = {name: artifact for name, artifact in artifacts.items() if name in STUDIES}
    for name, artifact in known.items():
        if artifact["schema"] != schema.STUDY_SCHEMA:
            raise ValueError(f"{name} has schema {artifact['schema']!r}, expected {schema.STUDY_SCHEMA}")
    return tuple(STUDIES[name](**artifact) for name, artifact in known.items())


def _check_steps(snapshots: Sequence[ValueSnapshot | GradientSnapshot]) -> None:
    steps = [one.step for one in snapshots]
    if sorted(set(steps)) != steps:
        raise ValueError(f"snapshots at steps {steps}, expected increasing ones")
