"""The plan file of a sweep: stages, grid, seeds, and the primary outcome fixed before any result is seen."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_klrb.errors import ConfigurationError

# The co-primary claims, corrected together.
PRIMARY_CLAIMS = ("T4", "T5")


@dataclass(frozen=True)
class Stage:
    """One step of the chain. All stages but the last are a single cell, shared by those that start from it.

    Args:
        config: The configuration file given to `fit`.
        inputs: Dotted configuration key -> the earlier stage whose checkpoint it receives.
        overrides: Dotted configuration key -> the value it takes instead of the file's.
    """

    config: str = MISSING
    inputs: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """The design of the last stage: every estimator at every beta in every replicate.

    Args:
        estimator: Names given to `--kl.estimator`.
        beta: Level id -> weight of the KL. Seeds follow the id: a new level takes a new one, and the
            others keep their seeds.
        replicates: Matched runs at each beta.
    """

    estimator: list[str] = MISSING
    beta: dict[int, float] = MISSING
    replicates: int = MISSING


@dataclass(frozen=True)
class Primary:
    """The comparison that decides, and how: by J = reward - beta * KL (T4) and by reward at matched KL (T5).

    Args:
        control: The estimator the others are compared with.
        alpha: Two-sided level of the family of these tests.
        margins: T4 or T5 -> difference in reward within which the estimators count as equivalent.
        kl_cuts: Bounds on the KL below which the frontier share is also counted.
        corner: KL and reward that hypervolume is measured from, worse than any run to be expected; by default
            the worst of the sweep's own runs, with which its size does not carry over to other sweeps.
        sequential: Whether evidence is also weighed pair by pair, so that replicates may be added until it
            suffices; costs power.
    """

    control: str = MISSING
    alpha: float = 0.05
    margins: dict[str, float] = field(default_factory=dict)
    kl_cuts: list[float] = field(default_factory=list)
    corner: list[float] = field(default_factory=list)
    sequential: bool = False


@dataclass(frozen=True)
class Plan:
    """A sweep: stages in the order they depend on each other, and the grid of the last.

    Args:
        name: What progress lines and the report call it.
        setting: What is trained on what, in a sentence: the report says beside its verdict what it is about.
        directory: Where the locked plan, the results and the working directories are kept.
        stages: Stage name -> stage; a stage may start from those above it.
        grid: The cells of the last stage.
        primary: The comparison that decides.
        root_seed: The root of every seed.
        threads: Threads each cell computes with.
        module: The package whose `fit` command runs a cell.
    """

    name: str = MISSING
    directory: str = MISSING
    stages: dict[str, Stage] = MISSING
    grid: Grid = MISSING
    primary: Primary = MISSING
    root_seed: int = 0
    threads: int = 1
    module: str = "lit_klrb"
    setting: str = ""

    @property
    def pairs(self) -> int:
        """Matched pairs of an estimator with the control: one per beta and replicate."""
        return len(self.grid.beta) * self.grid.replicates

    @property
    def comparisons(self) -> list[str]:
        """The estimators that are compared with the control."""
        return [name for name in self.grid.estimator if name != self.primary.control]

    @property
    def tests(self) -> int:
        """Tests in the family that decides."""
        return len(PRIMARY_CLAIMS) * len(self.comparisons)

    @property
    def level(self) -> float:
        """Holm's first step: what the family's smallest p must not exceed for anything to be rejected."""
        return self.primary.alpha / max(1, self.tests)

    @property
    def starting_points(self) -> list[str]:
        """The stages that every run of the grid starts from, directly or through others."""
        *_, last = self.stages
        found: set[str] = set()
        for name in reversed(self.stages):
            if name == last or name in found:
                found |= set(self.stages[name].inputs.values())
        return [name for name in self.stages if name in found]


def read_plan(path: Path) -> Plan:
    """Read and check a plan file.

    Raises:
        ConfigurationError: If the file or a value in it is not allowed; one line naming key and value.
    """
    try:
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig):
            raise ConfigurationError(f"{path}: a mapping with the keys of a plan is expected")
        beta = OmegaConf.select(content, "grid.beta")
        if isinstance(beta, ListConfig):
            levels = ", ".join(f"{index}: {value}" for index, value in enumerate(beta))
            raise ConfigurationError(
                f"{path}: grid.beta: a list is not allowed, give each level a lasting id: {{{levels}}}"
            )
        plan = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plan), content))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; the path of a plan file is expected") from None
    except YAMLError as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {_one_line(error)}") from None
    assert isinstance(plan, Plan)
    _check(plan, path)
    return plan


def _one_line(error: OmegaConfBaseException) -> str:
    reason = str(error).partition("\n")[0]
    return f"{error.full_key}: {reason}" if error.full_key else reason


def _check(plan: Plan, path: Path) -> None:
    """Check what types alone do not say."""

    def require(holds: bool, key: str, value: object, allowed: str) -> None:
        if not holds:
            raise ConfigurationError(f"{path}: {key}: {value!r} is not allowed; {allowed}")

    def one_of(key: str, value: str, allowed: Collection[str]) -> None:
        require(value in allowed, key, value, f"one of: {', '.join(allowed)}")

    grid, primary = plan.grid, plan.primary
    require(bool(plan.stages), "stages", plan.stages, "at least one stage is expected")
    earlier: list[str] = []
    for name, stage in plan.stages.items():
        for key, source in stage.inputs.items():
            above = f"a stage above: {', '.join(earlier) or 'there is none'}"
            require(source in earlier, f"stages.{name}.inputs.{key}", source, above)
        for key, value in stage.overrides.items():
            taken = f"stages.{name}.inputs already gives it a stage's checkpoint"
            require(key not in stage.inputs, f"stages.{name}.overrides.{key}", value, taken)
        earlier.append(name)
    require(
        len(set(grid.estimator)) == len(grid.estimator) > 0,
        "grid.estimator",
        grid.estimator,
        "different names",
    )
    require(bool(grid.beta), "grid.beta", grid.beta, "at least one level is expected")
    for index, beta in grid.beta.items():
        require(index >= 0, "grid.beta", index, "level ids are integers >= 0")
        require(math.isfinite(beta) and beta >= 0, f"grid.beta.{index}", beta, "finite numbers >= 0")
    require(grid.replicates >= 1, "grid.replicates", grid.replicates, "integers >= 1")
    require(plan.threads >= 1, "threads", plan.threads, "integers >= 1")
    require(plan.root_seed >= 0, "root_seed", plan.root_seed, "integers >= 0")
    one_of("primary.control", primary.control, grid.estimator)
    require(0 < primary.alpha < 1, "primary.alpha", primary.alpha, "numbers between 0 and 1")
    for claim, margin in primary.margins.items():
        one_of("primary.margins", claim, PRIMARY_CLAIMS)
        require(
            math.isfinite(margin) and margin > 0, f"primary.margins.{claim}", margin, "finite numbers > 0"
        )
    for cut in primary.kl_cuts:
        require(math.isfinite(cut) and cut > 0, "primary.kl_cuts", cut, "finite numbers > 0")
    allowed = "a positive KL and a reward, or nothing"
    finite = all(map(math.isfinite, primary.corner))
    require(
        not primary.corner or (len(primary.corner) == 2 and finite and primary.corner[0] > 0),
        "primary.corner",
        primary.corner,
        allowed,
    )
