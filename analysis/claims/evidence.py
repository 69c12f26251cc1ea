"""The committed artifacts from which verdicts are computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from analysis.results.artifacts import TabularStudy, ValueStudy, read_studies
from analysis.results.enumerated import DistillationArtifact, OffPolicyArtifact
from analysis.results.files import DamagedFileError, read_json
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

Artifact = TypeVar("Artifact", ValueStudy, TabularStudy, OffPolicyArtifact, DistillationArtifact)

# Folder of the studies' artifacts, and the numbers of the published sweep, relative to the ledger.
ARTIFACTS = "artifacts"
REVIEWS = Path("..") / "results" / "imdb_small" / "results.json"
# Artifact -> the configuration of `python -m lit_klrb study` that makes it.
STUDIES = {
    schema.IDENTITIES: "configs/studies/identities.yaml",
    schema.PITFALLS: "configs/studies/pitfalls.yaml",
    schema.OFF_POLICY: "configs/studies/off_policy.yaml",
    schema.ESTIMATION: "configs/studies/estimation.yaml",
    schema.DISTILLATION: "configs/studies/distillation_tabular.yaml",
}


@dataclass(frozen=True, eq=False)
class Evidence:
    """The artifacts.

    Attributes:
        identities: Content of the artifact of `IdentitiesStudy`.
        pitfalls: That of `PitfallsStudy`.
        off_policy: That of `OffPolicyStudy`.
        estimation: That of `PairEstimationStudy`.
        distillation: That of `DistillationStudy`.
        reviews: The numbers of the sweep on film reviews, `results.json`.
    """

    identities: dict[str, Any]
    pitfalls: TabularStudy
    off_policy: OffPolicyArtifact
    estimation: ValueStudy
    distillation: DistillationArtifact
    reviews: dict[str, Any]


def load_evidence(directory: Path) -> Evidence:
    """Read all artifacts.

    Args:
        directory: That of the ledger.

    Raises:
        ConfigurationError: If one is missing; names the command that makes it.
        DamagedFileError: If one cannot be read.
    """
    contents = {}
    for name, config in STUDIES.items():
        path = directory / ARTIFACTS / f"{name}.json"
        if not path.exists():
            raise ConfigurationError(f"{path} does not exist; python -m lit_klrb study --config {config}")
        contents[name] = read_json(path)
    reviews = directory / REVIEWS
    if not reviews.exists():
        raise ConfigurationError(f"{reviews} does not exist; python -m analysis report writes it")
    return evidence_of(contents, read_json(reviews))


def evidence_of(contents: dict[str, Any], reviews: dict[str, Any]) -> Evidence:
    """The evidence, from the contents of the artifacts by name.

    Raises:
        DamagedFileError: If one is not the artifact of its study.
    """
    return Evidence(
        contents[schema.IDENTITIES],
        _study(contents, schema.PITFALLS, TabularStudy),
        _study(contents, schema.OFF_POLICY, OffPolicyArtifact),
        _study(contents, schema.ESTIMATION, ValueStudy),
        _study(contents, schema.DISTILLATION, DistillationArtifact),
        reviews,
    )


def _study(contents: dict[str, Any], name: str, kind: type[Artifact]) -> Artifact:
    try:
        (study,) = read_studies({name: contents[name]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{name}.json: not the artifact of its study ({error!r})") from error
    assert isinstance(study, kind)
    return study
