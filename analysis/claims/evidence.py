"""The committed artifacts from which verdicts are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from analysis.claims.trained import Trained, load_trained
from analysis.results.artifacts import TabularStudy, ValueStudy, read_studies
from analysis.results.enumerated import DistillationArtifact, OffPolicyArtifact
from analysis.results.files import DamagedFileError, read_json
from lit_klrb import schema
from lit_klrb.errors import ConfigurationError

Artifact = TypeVar("Artifact", ValueStudy, TabularStudy, OffPolicyArtifact, DistillationArtifact)

# Folder of the studies' artifacts, and that of the published sweeps, relative to the ledger.
ARTIFACTS = "artifacts"
RESULTS = Path("..") / "results"
# Artifact -> the configuration of `python -m lit_klrb study` that makes it.
STUDIES = {
    schema.IDENTITIES: "configs/studies/identities.yaml",
    schema.PITFALLS: "configs/studies/pitfalls.yaml",
    schema.OFF_POLICY: "configs/studies/off_policy.yaml",
    schema.ESTIMATION: "configs/studies/estimation.yaml",
    schema.DISTILLATION: "configs/studies/distillation_tabular.yaml",
}
# Published sweep -> what it trains.
REVIEWS, INNER_STEPS = "imdb_small", "off_policy"
SWEEPS = {
    "studies": "embedded world, β 0.5 to 2",
    "noise": "embedded world, β 0.1 to 1",
    "imdb_noise": "reviews, β 0.03",
    REVIEWS: "reviews, one rate, β 0.03 to 0.3",
    INNER_STEPS: "embedded world, four inner steps",
    "distillation_full": "embedded world, full",
    "distillation_limited": "embedded world, limited, where students end completions at once",
    "imdb_distill": "reviews, limited",
}
# What the student of a sweep that distils can do: match its teacher, or not.
CAPACITIES = {"distillation_full": "full", "distillation_limited": "limited", "imdb_distill": "limited"}


@dataclass(frozen=True, eq=False)
class Evidence:
    """The artifacts.

    Attributes:
        identities: Content of the artifact of `IdentitiesStudy`.
        pitfalls: That of `PitfallsStudy`.
        off_policy: That of `OffPolicyStudy`.
        estimation: That of `PairEstimationStudy`.
        distillation: That of `DistillationStudy`.
        sweeps: The published sweeps by name; a sweep that is not published yet is not in it.
    """

    identities: dict[str, Any]
    pitfalls: TabularStudy
    off_policy: OffPolicyArtifact
    estimation: ValueStudy
    distillation: DistillationArtifact
    sweeps: Mapping[str, Trained]

    @property
    def policies(self) -> list[Trained]:
        """The sweeps that train a policy with a reward."""
        return [one for name, one in self.sweeps.items() if name not in CAPACITIES]

    @property
    def students(self) -> list[tuple[str, Trained]]:
        """The sweeps that distil, each with its student's capacity."""
        return [(CAPACITIES[name], one) for name, one in self.sweeps.items() if name in CAPACITIES]


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
    return evidence_of(contents, load_sweeps(directory))


def load_sweeps(directory: Path) -> dict[str, Trained]:
    """The sweeps that are published, by name.

    A page shows the rows of a sweep from its publication on: without its directory the pages differ, which
    `verify_ledger` finds.

    Args:
        directory: That of the ledger.

    Raises:
        ConfigurationError: If that of reviews, which has table 1, is missing; or if one is not complete.
        DamagedFileError: If one cannot be read.
    """
    found = {name: directory / RESULTS / name for name in SWEEPS}
    return {
        name: load_trained(path, SWEEPS[name])
        for name, path in found.items()
        if name == REVIEWS or path.is_dir()
    }


def evidence_of(contents: dict[str, Any], sweeps: Mapping[str, Trained]) -> Evidence:
    """The evidence, from the contents of the artifacts by name and the sweeps.

    Raises:
        DamagedFileError: If one is not the artifact of its study.
    """
    return Evidence(
        contents[schema.IDENTITIES],
        _study(contents, schema.PITFALLS, TabularStudy),
        _study(contents, schema.OFF_POLICY, OffPolicyArtifact),
        _study(contents, schema.ESTIMATION, ValueStudy),
        _study(contents, schema.DISTILLATION, DistillationArtifact),
        sweeps,
    )


def _study(contents: dict[str, Any], name: str, kind: type[Artifact]) -> Artifact:
    try:
        (study,) = read_studies({name: contents[name]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{name}.json: not the artifact of its study ({error!r})") from error
    assert isinstance(study, kind)
    return study
