"""The plan of a sweep: stages, grid, seeds, and the comparison that decides, fixed before any result."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations, product
from typing import Any

from analysis.results.cell import ESTIMATOR, Trial
from analysis.results.grid import Grid, by_beta, is_plain_data, plain_key
from analysis.results.rates import TUNING, Tuning
from lit_klrb.errors import ConfigurationError

# The outcomes with margins if J = reward - beta * KL decides: J, and the reward at matched KL.
REWARD_OUTCOMES = ("objective", "matched_kl")
# The outcomes that can decide.
OUTCOMES = ("objective", "kl")
# The commands of a stage: the training of a run, and a study, which trains nothing.
FIT, STUDY = "fit", "study"
# Configuration keys of a run that the design sets.
SEED, BETA = "seed_everything", "kl.beta"
# Keys of the command line that no arm may set, and why.
_RESERVED = {
    SEED: "seeds follow from root_seed",
    BETA: "grid.beta sets it",
    "config": "the stage names it",
    "ckpt_path": "every cell starts afresh",
    "trainer.default_root_dir": "every cell has its own",
}
# Maximum number of runs of a grid, against typing errors.
_MOST_RUNS = 1_000_000
# Maximum number of characters of a name, which stands beside every number.
_LONGEST = 200


@dataclass(frozen=True)
class Stage:
    """A stage of training. All stages except the last are single cells, shared by those that start from them.

    Args:
        config: The configuration file given to the command.
        inputs: Dotted configuration key -> the earlier stage whose checkpoint it receives.
        overrides: Dotted configuration key -> the value it takes instead of the file's.
        command: "fit", or "study" for a study, which trains nothing.
    """

    config: str
    inputs: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    command: str = FIT

    def record(self) -> dict[str, Any]:
        """Its record in the locked plan; the command is omitted if it is fit, as in earlier versions."""
        design = asdict(self)
        if self.command == FIT:
            del design["command"]
        return design


@dataclass(frozen=True)
class Primary:
    """The comparison that decides: by J = reward - beta * KL, or by the KL alone.

    Args:
        control: The arm the others are compared with.
        alpha: Two-sided level of the family of these tests.
        margins: "objective" or "matched_kl" -> difference in reward within which arms count as equivalent;
            where the KL decides, "kl" -> difference in nats.
        kl_cuts: Bounds on the KL below which the frontier share is also counted.
        corner: KL and reward that hypervolume is measured from, worse than any run to be expected; by default
            the worst of the sweep's own runs, with which its size does not carry over to other sweeps.
        outcome: "objective" decides by J. "kl" decides by the KL alone, lower being better: for distillation,
            where the reference is the teacher and there is no reward.
        sequential: Whether evidence is weighed pair by pair, so that replicates may be added until it
            suffices; costs power.
    """

    control: str
    alpha: float = 0.05
    margins: dict[str, float] = field(default_factory=dict)
    kl_cuts: list[float] = field(default_factory=list)
    corner: list[float] = field(default_factory=list)
    sequential: bool = False
    outcome: str = "objective"

    @property
    def margin_keys(self) -> tuple[str, ...]:
        """The outcomes that may have a margin."""
        return ("kl",) if self.outcome == "kl" else REWARD_OUTCOMES


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
    def tests(self) -> int:
        """Number of tests in the primary family: one per comparison."""
        return len(self.comparisons)

    @property
    def level(self) -> float:
        """The level of Holm's first step, which the smallest p of the family must not exceed."""
        return self.primary.alpha / max(1, self.tests)

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
        *_, last = self.stages
        found: set[str] = set()
        for name in reversed(self.stages):
            if name == last or name in found:
                found |= set(self.stages[name].inputs.values())
        return [name for name in self.stages if name in found]

    def record(self) -> dict[str, Any]:
        """The record of the design in the locked plan, without the directory, which may change."""
        design = asdict(self)
        del design["directory"]
        if self.tuning is None:  # as in plans of earlier versions
            del design["tuning"]
        design["stages"] = {name: stage.record() for name, stage in self.stages.items()}
        design["grid"]["beta"] = {str(index): beta for index, beta in self.grid.beta.items()}
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
                "primary": Primary(**record["primary"]),
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
        self._check_grid()
        self._check_primary()
        self._check_tuning()
        _require_short("name", self.name)
        _require("\0" not in self.directory, "directory", self.directory, "no path has a null character")
        _require(bool(self.directory.strip()), "directory", self.directory, "the path of a directory")
        _require("://" not in self.directory, "directory", self.directory, "a directory of this machine")
        _require(self.threads >= 1, "threads", self.threads, "integers >= 1")
        _require(self.root_seed >= 0, "root_seed", self.root_seed, "integers >= 0")

    def _check_stages(self) -> None:
        _require(bool(self.stages), "stages", self.stages, "at least one stage is expected")
        earlier: list[str] = []
        for name, stage in self.stages.items():
            _require_short("stages", name)
            for key, source in stage.inputs.items():
                above = f"a stage above: {', '.join(earlier) or 'there is none'}"
                _require(source in earlier, f"stages.{name}.inputs.{key}", source, above)
            for key, value in stage.overrides.items():
                taken = f"stages.{name}.inputs already gives it a stage's checkpoint"
                _require(key not in stage.inputs, f"stages.{name}.overrides.{key}", value, taken)
            _one_of(f"stages.{name}.command", stage.command, (FIT, STUDY))
            if stage.command == FIT:
                earlier.append(name)
            else:
                _require(
                    not stage.inputs, f"stages.{name}.inputs", stage.inputs, "a study takes no checkpoint"
                )
                grid = "a study cannot be the last stage, to which the grid applies"
                _require(name != list(self.stages)[-1], f"stages.{name}.command", STUDY, grid)

    def _check_grid(self) -> None:
        betas, replicates = self.grid.beta, self.grid.replicates
        self._check_arms()
        _require(bool(betas), "grid.beta", betas, "at least one weight is expected")
        for index, beta in betas.items():
            _require(index >= 0, "grid.beta", index, "indices are integers >= 0")
            _require(math.isfinite(beta) and beta >= 0, f"grid.beta.{index}", beta, "finite numbers >= 0")
            same = [other for other in betas if betas[other] == beta and other != index]
            _require(
                not same, f"grid.beta.{index}", beta, f"another weight than grid.beta.{(same or [0])[0]}"
            )
        most = _MOST_RUNS // (len(self.grid.arms) * len(betas))
        allowed = f"integers from 1 to {most} (a million runs)"
        _require(type(replicates) is int and 1 <= replicates <= most, "grid.replicates", replicates, allowed)

    def _check_arms(self) -> None:
        arms, last = self.grid.arms, list(self.stages)[-1]
        inputs = dict.fromkeys(map(plain_key, self.stages[last].inputs), f"stages.{last}.inputs sets it")
        taken = _RESERVED | inputs
        _require(bool(arms), "grid.arms", arms, "at least one arm is expected")
        for label, overrides in arms.items():
            named = bool(label) and label.isprintable() and label.strip() == label
            _require(named, "grid.arms", label, "labels are printable and have no blanks around them")
            _require_short("grid.arms", label)
            for key, value in overrides.items():
                place = f"grid.arms.{label}.{key}"
                _require(plain_key(key) not in taken, place, value, taken.get(plain_key(key), ""))
                _require(is_plain_data(value), place, value, "plain values, lists and mappings are expected")
                self._check_by_beta(place, key, value)
        for (one, ours), (other, theirs) in combinations(arms.items(), 2):
            _require(ours != theirs, f"grid.arms.{other}", theirs, f"{one} is the same")

    def _check_by_beta(self, place: str, key: str, value: Any) -> None:
        values = by_beta(value)
        if values is None:
            return
        indices = [str(index) for index in self.grid.beta]
        _require(set(values) == {*indices}, place, value, f"a value for each of {', '.join(indices)}")
        estimator = plain_key(key) == ESTIMATOR or plain_key(key).startswith(f"{ESTIMATOR}.")
        _require(not estimator, place, value, "an arm has the same estimator at every beta")

    def _check_tuning(self) -> None:
        if self.tuning is None:
            return
        self.tuning.check()
        _require(TUNING not in self.stages, f"stages.{TUNING}", TUNING, "a plan with tuning has this stage")
        key = plain_key(self.tuning.key)
        _require(key not in _RESERVED, "tuning.key", self.tuning.key, _RESERVED.get(key, ""))
        for label, overrides in self.grid.arms.items():
            for name, value in overrides.items():
                place = f"grid.arms.{label}.{name}"
                _require(plain_key(name) != key, place, value, "tuning chooses it")

    def _check_primary(self) -> None:
        primary = self.primary
        _one_of("primary.control", primary.control, self.grid.arms)
        _one_of("primary.outcome", primary.outcome, OUTCOMES)
        _require(0 < primary.alpha < 0.5, "primary.alpha", primary.alpha, "numbers between 0 and 0.5")
        for outcome, margin in primary.margins.items():
            _one_of("primary.margins", outcome, primary.margin_keys)
            allowed = "finite numbers > 0"
            _require(math.isfinite(margin) and margin > 0, f"primary.margins.{outcome}", margin, allowed)
        for cut in primary.kl_cuts:
            _require(math.isfinite(cut) and cut > 0, "primary.kl_cuts", cut, "finite numbers > 0")
        corner = primary.corner
        possible = len(corner) == 2 and all(map(math.isfinite, corner)) and corner[0] > 0
        _require(not corner or possible, "primary.corner", corner, "a positive KL and a reward, or nothing")


def _require(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigurationError(f"{value!r} is not allowed; {allowed}", key=key)


def _require_short(key: str, name: str) -> None:
    allowed = f"names have at most {_LONGEST} characters, got {len(name)}"
    _require(len(name) <= _LONGEST, key, f"{name[:20]}...", allowed)


def _one_of(key: str, value: str, allowed: Collection[str]) -> None:
    _require(value in allowed, key, value, f"one of: {', '.join(allowed)}")
