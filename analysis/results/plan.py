"""The plan of a sweep: stages, grid, seeds, and the comparison that decides, fixed before any result."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from analysis.results.cell import Point, Trial
from analysis.results.checks import RESERVED, check_grid, check_multiple, one_of, require, require_short
from analysis.results.grid import Grid, plain_key
from analysis.results.rates import TUNING, Tuning
from analysis.results.stage import FIT, STUDY, Stage

# The outcomes with margins if J = reward - beta * KL decides: J, and the reward at matched KL.
REWARD_OUTCOMES = ("objective", "matched_kl")
# The outcomes that can decide.
OUTCOMES = ("objective", "kl")
# Keys of earlier versions, which every plan that was locked by them has.
_GONE = ("kl_cuts", "corner", "sequential")


@dataclass(frozen=True)
class Primary:
    """The comparison that decides: by J = reward - beta * KL, or by the KL alone.

    Args:
        control: The arm the others are compared with.
        alpha: Two-sided level of the family of these tests.
        margins: "objective" or "matched_kl" -> difference in reward within which arms count as equivalent;
            where the KL decides, "kl" -> difference in nats.
        outcome: "objective" decides by J. "kl" decides by the KL alone, lower being better: for distillation,
            where the reference is the teacher and there is no reward.
    """

    control: str
    alpha: float = 0.05
    margins: dict[str, float] = field(default_factory=dict)
    outcome: str = "objective"

    @property
    def symbol(self) -> str:
        """What decides, on a page."""
        return "KL" if self.outcome == "kl" else "J"


def _known(primary: Mapping[str, Any]) -> dict[str, Any]:
    """The record of what decides, without keys of earlier versions that were not used."""
    return {key: value for key, value in primary.items() if value or key not in _GONE}


@dataclass(frozen=True)
class Plan:
    """A sweep: stages in the order they depend on each other, and the grid of the last.

    Args:
        name: What progress lines and the report call it.
        directory: Where the locked plan, the results and the working directories are kept.
        stages: Stage name -> stage; a stage may start from those above it.
        grid: The cells of the last stage.
        primary: The comparison that decides.
        root_seed: The root of every seed.
        threads: Threads each cell computes with.
        module: The package whose `fit` command runs a cell.
        setting: What is trained on what, in a sentence: the report says beside its verdict what it is about.
        tuning: The stage that chooses a rate for each arm before the grid runs; None without one.
    """

    name: str
    directory: str
    stages: dict[str, Stage]
    grid: Grid
    primary: Primary
    root_seed: int = 0
    threads: int = 1
    module: str = "lit_klrb"
    setting: str = ""
    tuning: Tuning | None = None

    @property
    def pairs(self) -> int:
        """Number of matched pairs of an arm with the control: one per beta and replicate."""
        return len(self.grid.beta) * self.grid.replicates

    @property
    def comparisons(self) -> list[str]:
        """The arms that are compared with the control."""
        return [name for name in self.grid.arms if name != self.primary.control]

    @property
    def level(self) -> float:
        """The level of Holm's first step, which the smallest p of the family must not exceed."""
        return self.primary.alpha / max(1, len(self.comparisons))

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(arm, beta index, replicate) of every planned run of the grid."""
        grid = self.grid
        return [(a, b, r) for a in grid.arms for b in grid.beta for r in range(grid.replicates)]

    @property
    def trials(self) -> list[Trial]:
        """Every planned run of the tuning stage, in the order of replicate, beta, rate and arm."""
        if self.tuning is None:
            return []
        betas, rates = self.grid.beta.items(), self.tuning.rates
        places = product(range(self.tuning.replicates), betas, rates, self.grid.arms)
        return [Trial(arm, beta, index, r, rate) for r, (index, beta), rate, arm in places]

    @property
    def starting_points(self) -> list[str]:
        """The stages from which every run of the grid starts, directly or indirectly."""
        shared = set(self.stages)
        for replicate in range(max(1, len(self.grid.blocks))):
            found = set(self.inputs(replicate).values())
            for name in reversed(self.stages):
                if name in found:
                    found |= set(self.stages[name].inputs.values())
            shared &= found
        return [name for name in self.stages if name in shared]

    def overrides(self, place: Point | Trial) -> dict[str, Any]:
        """Configuration key -> the value that the block and the arm of a run of the last stage give it."""
        own = self.grid.overrides(place.arm, place.beta_index)
        return {**self.grid.block(place.replicate).overrides, **own}

    def inputs(self, replicate: int) -> dict[str, str]:
        """Configuration key -> the stage whose checkpoint a run of the last stage receives."""
        *_, last = self.stages.values()
        own = self.grid.block(replicate).inputs
        replaced = {plain_key(key) for key in own}
        return {key: stage for key, stage in last.inputs.items() if plain_key(key) not in replaced} | own

    def record(self) -> dict[str, Any]:
        """The record of the design in the locked plan, without the directory, which may change."""
        design = asdict(self)
        del design["directory"]
        if self.tuning is None:  # as in plans of earlier versions
            del design["tuning"]
        design["stages"] = {name: stage.record() for name, stage in self.stages.items()}
        design["grid"] = self.grid.record()
        return design

    @classmethod
    def of_record(cls, record: Mapping[str, Any], directory: str) -> "Plan":
        """Create a plan from its record.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: If it is not the record of a plan.
        """
        plan = cls(
            **{
                **record,
                "directory": directory,
                "stages": {name: Stage(**stage) for name, stage in record["stages"].items()},
                "grid": Grid.of_record(record["grid"]),
                "primary": Primary(**_known(record["primary"])),
                "tuning": Tuning(**record["tuning"]) if "tuning" in record else None,
            }
        )
        plan.check()
        return plan

    def check(self) -> None:
        """Check the conditions that types do not express.

        Raises:
            ConfigurationError: If a value is not allowed; one line naming key and value.
        """
        self._check_stages()
        check_grid(self.grid, self.stages)
        self._check_primary()
        self._check_tuning()
        require_short("name", self.name)
        require("\0" not in self.directory, "directory", self.directory, "no path has a null character")
        require(bool(self.directory.strip()), "directory", self.directory, "the path of a directory")
        require("://" not in self.directory, "directory", self.directory, "a directory of this machine")
        require(self.threads >= 1, "threads", self.threads, "integers >= 1")
        require(self.root_seed >= 0, "root_seed", self.root_seed, "integers >= 0")

    def _check_stages(self) -> None:
        require(bool(self.stages), "stages", self.stages, "at least one stage is expected")
        earlier: list[str] = []
        for name, stage in self.stages.items():
            require_short("stages", name)
            for key, source in stage.inputs.items():
                above = f"a stage above: {', '.join(earlier) or 'there is none'}"
                require(source in earlier, f"stages.{name}.inputs.{key}", source, above)
            for key, value in stage.overrides.items():
                taken = f"stages.{name}.inputs already gives it a stage's checkpoint"
                require(key not in stage.inputs, f"stages.{name}.overrides.{key}", value, taken)
            one_of(f"stages.{name}.command", stage.command, (FIT, STUDY))
            if stage.command == FIT:
                earlier.append(name)
            else:
                require(
                    not stage.inputs, f"stages.{name}.inputs", stage.inputs, "a study takes no checkpoint"
                )
                grid = "a study cannot be the last stage, to which the grid applies"
                require(name != list(self.stages)[-1], f"stages.{name}.command", STUDY, grid)

    def _check_tuning(self) -> None:
        if self.tuning is None:
            return
        self.tuning.check()
        check_multiple(self.grid, "tuning.replicates", self.tuning.replicates)
        require(TUNING not in self.stages, f"stages.{TUNING}", TUNING, "a plan with tuning has this stage")
        key = plain_key(self.tuning.key)
        require(key not in RESERVED, "tuning.key", self.tuning.key, RESERVED.get(key, ""))
        changed = {f"grid.arms.{label}": overrides for label, overrides in self.grid.arms.items()}
        blocks = self.grid.blocks.items()
        changed |= {f"grid.blocks.{label}.overrides": block.overrides for label, block in blocks}
        for place, overrides in changed.items():
            for name, value in overrides.items():
                require(plain_key(name) != key, f"{place}.{name}", value, "tuning chooses it")

    def _check_primary(self) -> None:
        primary = self.primary
        one_of("primary.control", primary.control, self.grid.arms)
        one_of("primary.outcome", primary.outcome, OUTCOMES)
        require(0 < primary.alpha < 0.5, "primary.alpha", primary.alpha, "numbers between 0 and 0.5")
        for outcome, margin in primary.margins.items():
            one_of("primary.margins", outcome, ("kl",) if primary.outcome == "kl" else REWARD_OUTCOMES)
            allowed = "finite numbers > 0"
            require(math.isfinite(margin) and margin > 0, f"primary.margins.{outcome}", margin, allowed)
