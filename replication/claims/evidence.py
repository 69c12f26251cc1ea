"""The committed artifacts from which verdicts are computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from analysis.results.artifacts import GradientStudy, ValueStudy, read_studies
from analysis.results.store import MALFORMED, DamagedFileError, present, read_json
from lit_klrb.errors import ConfigurationError
from lit_klrb.schema import ESTIMATION, GRADIENT_NOISE
from replication import schema
from replication.artifacts import (
    DistillationArtifact,
    OffPolicyArtifact,
    TabularStudy,
    read_distillation,
    read_off_policy,
    read_pitfalls,
)
from replication.claims.trained import Trained, load_trained

Artifact = TypeVar("Artifact")

# Folder of the studies' artifacts, and those of published results, relative to the ledger.
ARTIFACTS = Path("artifacts")
RESULTS = Path("..") / "results"
REVIEWS = RESULTS / "imdb_estimation"
SMOLLM2 = "smollm2_estimation"


class StudyFile(NamedTuple):
    """The artifact of a study.

    Args:
        directory: Its folder, relative to the ledger.
        study: The study's name, which is that of the file.
        config: The configuration that makes it.
        command: The command that makes it.
    """

    directory: Path
    study: str
    config: str
    command: str = "replication study"

    @property
    def path(self) -> Path:
        """The file, relative to the ledger."""
        return self.directory / f"{self.study}.json"

    @property
    def made_by(self) -> str:
        """The command line that makes it."""
        return f"python -m {self.command} --config {self.config}"


_CONFIGS = "replication/configs/studies"
# Field of the evidence -> its artifact.
STUDIES = {
    "identities": StudyFile(ARTIFACTS, schema.IDENTITIES, f"{_CONFIGS}/identities.yaml"),
    "pitfalls": StudyFile(ARTIFACTS, schema.PITFALLS, f"{_CONFIGS}/pitfalls.yaml"),
    "off_policy": StudyFile(ARTIFACTS, schema.OFF_POLICY, f"{_CONFIGS}/off_policy.yaml"),
    "estimation": StudyFile(ARTIFACTS, ESTIMATION, f"{_CONFIGS}/estimation.yaml"),
    "distillation": StudyFile(ARTIFACTS, schema.DISTILLATION, f"{_CONFIGS}/distillation_tabular.yaml"),
    "reviews": StudyFile(REVIEWS, ESTIMATION, f"{_CONFIGS}/imdb_estimation.yaml"),
    "reviews_noise": StudyFile(REVIEWS, GRADIENT_NOISE, f"{_CONFIGS}/imdb_gradient_noise.yaml"),
    "smollm2": StudyFile(
        RESULTS / SMOLLM2, ESTIMATION, f"replication/configs/{SMOLLM2}/rloo.yaml", "lit_klrb fit"
    ),
    "smollm2_far": StudyFile(
        RESULTS / SMOLLM2 / "far", ESTIMATION, f"replication/configs/{SMOLLM2}/far.yaml"
    ),
    "smollm2_end": StudyFile(
        RESULTS / SMOLLM2 / "end", ESTIMATION, f"replication/configs/{SMOLLM2}/end.yaml"
    ),
}
# What makes the end of a sweep useless, in its title.
DEGENERATE = "students end completions at once"
# Published sweep -> what it trains.
INNER_STEPS = "off_policy"
SWEEPS = {
    "studies": "embedded world, β 0.5 to 2",
    "noise": "embedded world, β 0.1 to 1",
    "imdb_noise": "reviews, β 0.03",
    "imdb_night": "reviews, better models, β 0.1, rates of one run each: unresolved",
    "imdb_night_equal": "reviews, better models, β 0.1, one rate, two thirds of the same runs",
    "imdb_small": "reviews, one rate, β 0.03 to 0.3",
    "smollm2_sums": "SmolLM2, sums, β 0.1, rates as chosen",
    "smollm2_reviews": "reviews, SmolLM2, β 0.2, rates as chosen",
    "smollm2_samples": "reviews, SmolLM2, β 0.1, one rate, four warm starts",
    "smollm2_starts": "reviews, SmolLM2, β 0.1, one rate, eight warm starts",
    "smollm2_rates": "reviews, SmolLM2, β 0.1, rates as chosen, eight warm starts",
    "smollm2_parts": "reviews, SmolLM2, β 0.1, one rate, eight warm starts, parts of the default",
    "smollm2_frontier": "reviews, SmolLM2, β 0.025 to 0.4, one rate, eight warm starts",
    "smollm2_released": "reviews, SmolLM2, β 0.0125 to 0.2, twice the rate, eight warm starts",
    "smollm2_places": "reviews, SmolLM2, β 0.1, one rate, eight warm starts, two places of sixteen",
    "smollm2_learned": "reviews, SmolLM2, a learned reward, β 0.1, one rate, eight warm starts",
    INNER_STEPS: "embedded world, four inner steps",
    "distillation_full": "embedded world, full",
    "distillation_limited": f"embedded world, limited, where {DEGENERATE}",
    "imdb_distill": "reviews, limited",
    "smollm2_json": "SmolLM2 and its own context, one rate",
    "smollm2_credit": "SmolLM2 and its own context, two contexts, rates as chosen",
    "smollm2_heal": "SmolLM2 without two layers, rates as chosen",
    "smollm2_future": "SmolLM2 and its own context, two contexts, a rate from one run each",
    "smollm2_forward": "SmolLM2 and its own context, two contexts, one rate",
    "smollm2_directions": "SmolLM2 and its own context, two contexts, new rates as chosen",
    "smollm2_contexts": "SmolLM2 and its own context, two other contexts, rates as chosen",
    "smollm2_heal_forward": "SmolLM2 without two layers, one rate",
    "smollm2_length_24": f"SmolLM2 with twelve of its layers, where {DEGENERATE}",
    "smollm2_length_96": "SmolLM2 and its own context, eight contexts, 96 tokens, one rate",
}
# What the student of a sweep that distils can do: match its teacher, or not.
CAPACITIES = {
    "distillation_full": "full",
    "distillation_limited": "limited",
    "imdb_distill": "limited",
    "smollm2_json": "full",
    "smollm2_credit": "full",
    "smollm2_heal": "limited",
    "smollm2_future": "full",
    "smollm2_forward": "full",
    "smollm2_directions": "full",
    "smollm2_contexts": "full",
    "smollm2_heal_forward": "limited",
    "smollm2_length_24": "limited",
    "smollm2_length_96": "full",
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
        reviews: That of `PairEstimationStudy` on a policy that writes reviews.
        reviews_noise: That of `PairGradientNoiseStudy` on the same policy.
        smollm2: That of `EstimationStudy` on SmolLM2, which continues reviews.
        smollm2_far: That of `PairEstimationStudy` on SmolLM2 after DPO, and after RLOO at two rates.
        smollm2_end: The same at the end of the run that was nearest to the paper's KL.
        sweeps: The published sweeps by name; a sweep that is not published yet is not in it.
    """

    identities: dict[str, Any]
    pitfalls: TabularStudy
    off_policy: OffPolicyArtifact
    estimation: ValueStudy
    distillation: DistillationArtifact
    reviews: ValueStudy
    reviews_noise: GradientStudy
    smollm2: ValueStudy
    smollm2_far: ValueStudy
    smollm2_end: ValueStudy
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
    for name, file in STUDIES.items():
        path = present(directory / file.path)
        if not path.exists():
            raise ConfigurationError(f"{path} does not exist; {file.made_by}")
        contents[name] = read_json(path)
    return evidence_of(contents, load_sweeps(directory))


def load_sweeps(directory: Path) -> dict[str, Trained]:
    """The sweeps that are published, by name.

    A page shows the rows of a sweep from its publication on: without its directory the pages differ, which
    `verify_ledger` finds.

    Args:
        directory: That of the ledger.

    Raises:
        ConfigurationError: If one is not complete.
        DamagedFileError: If one cannot be read.
    """
    found = {name: directory / RESULTS / name for name in SWEEPS}
    return {name: load_trained(path, SWEEPS[name]) for name, path in found.items() if path.is_dir()}


def evidence_of(contents: dict[str, Any], sweeps: Mapping[str, Trained]) -> Evidence:
    """The evidence, from the contents of the artifacts by field and the sweeps.

    Raises:
        DamagedFileError: If one is not the artifact of its study.
    """
    return Evidence(
        contents["identities"],
        _study(contents, "pitfalls", read_pitfalls),
        _study(contents, "off_policy", read_off_policy),
        _study(contents, "estimation", _of_values),
        _study(contents, "distillation", read_distillation),
        _study(contents, "reviews", _of_values),
        _study(contents, "reviews_noise", _of_gradients),
        _study(contents, "smollm2", _of_values),
        _study(contents, "smollm2_far", _of_values),
        _study(contents, "smollm2_end", _of_values),
        sweeps,
    )


def _study(contents: dict[str, Any], name: str, read: Callable[[dict[str, Any]], Artifact]) -> Artifact:
    try:
        return read(contents[name])
    except MALFORMED as error:
        raise DamagedFileError(f"{STUDIES[name].path}: not the artifact of its study ({error!r})") from error


def _of_values(content: dict[str, Any]) -> ValueStudy:
    (study,) = read_studies({ESTIMATION: content})
    assert isinstance(study, ValueStudy)
    return study


def _of_gradients(content: dict[str, Any]) -> GradientStudy:
    (study,) = read_studies({GRADIENT_NOISE: content})
    assert isinstance(study, GradientStudy)
    return study
