"""The plan of a sweep as types: stages, grid, seeds, and what decides, fixed before any result.

What the types do not say is in `rules`.
"""

from collections.abc import Mapping
from dataclasses import asdict, field
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from analysis.results.keys import ESTIMATOR, Inputs, Overrides, by_beta, plain_key

# Unknown keys, NaN and infinities are errors.
CLOSED = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
# The same for results, in which null replaces numbers that are not finite.
WITH_NAN = ConfigDict(**{**CLOSED, "allow_inf_nan": True})
# The name of the stage of tuning.
TUNING = "tuning"


class Point(NamedTuple):
    """The position of a cell of the last stage in the grid."""

    arm: str
    beta: StrictFloat
    beta_index: StrictInt
    replicate: StrictInt

    @property
    def place(self) -> tuple[str, int, int]:
        """(arm, beta index, replicate), which is unique within a sweep."""
        return self.arm, self.beta_index, self.replicate


class Trial(NamedTuple):
    """The position of a cell of the tuning stage: an arm at one rate."""

    arm: str
    beta: StrictFloat
    beta_index: StrictInt
    replicate: StrictInt
    rate: StrictFloat


def _arms(content: Any) -> Any:
    """A list of estimators is spelled out as arms."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(name, str) for name in content) or len(set(content)) < len(content):
        raise ValueError("a list of different names of estimators, or label -> what the arm changes")
    return {name: {ESTIMATOR: name} for name in content}


def _label(label: str) -> str:
    if not (label and label.isprintable() and label.strip() == label):
        raise ValueError("labels are printable and have no blanks around them")
    return label


# Numbers, not texts or booleans
Positive = Annotated[float, Field(strict=True, gt=0)]
# With a far larger weight, powers of J overflow
Weight = Annotated[float, Field(strict=True, ge=0, le=1e12)]
Count = Annotated[int, Field(strict=True, ge=0)]
Threads = Annotated[int, Field(strict=True, ge=1)]
# A name stands beside every number
Name = Annotated[str, Field(max_length=200)]
Label = Annotated[Name, AfterValidator(_label)]
Index = Annotated[int, Field(ge=0)]
# Lists that stand for mappings are part of the JSON schema of a plan
_NUMBERED = BeforeValidator(
    lambda value: dict(enumerate(value)) if isinstance(value, list) else value,
    json_schema_input_type=list[Weight] | dict[Index, Weight],
)


@dataclass(frozen=True, config=CLOSED)
class Stage:
    """A stage of training. All but the last are single cells, shared by those that start from them."""

    config: str  # the configuration file given to the command
    # Dotted configuration key -> the earlier stage whose checkpoint it receives
    inputs: Inputs = field(default_factory=dict)
    # Dotted configuration key -> the value it takes instead of the file's
    overrides: Overrides = field(default_factory=dict)
    command: Literal["fit", "study"] = "fit"  # a study trains nothing
    threads: Threads | None = None  # threads of its cells, instead of the plan's
    # GPUs of its own that each of its cells gets; by default one per process if it trains on GPUs
    gpus: Count | None = None

    @property
    def trains(self) -> bool:
        """Whether it leaves a checkpoint, from which others can start."""
        return self.command == "fit"


@dataclass(frozen=True, config=CLOSED)
class Block:
    """What the runs of a block share, and those of other blocks do not."""

    overrides: Overrides = field(default_factory=dict)
    inputs: Inputs = field(default_factory=dict)  # beside those of the last stage, or in place of them


@dataclass(frozen=True, config=CLOSED)
class Grid:
    """The design of the last stage: every arm at every beta in every replicate."""

    # Label -> what the arm changes: configuration key -> value, as on the command line of `fit`, or
    # `{by_beta: {index: value}}` for a value that differs between betas, such as a learning rate. A list of
    # estimators stands for arms that differ in `kl.estimator` alone.
    arms: Annotated[
        dict[Label, Overrides],
        BeforeValidator(_arms, json_schema_input_type=list[str] | dict[Label, Overrides]),
    ]
    # Index -> weight of the KL; in a list, the index is the position. Seeds follow the index: a new weight
    # takes a new one, and the others keep their seeds.
    beta: Annotated[dict[Index, Weight], _NUMBERED]
    replicates: StrictInt = 10  # matched runs at each beta
    # Label -> block: warm starts, or anything else on which statements should not depend. Replicate r belongs
    # to block r mod B of B blocks.
    blocks: dict[Label, Block] = field(default_factory=dict)

    def block_of(self, replicate: int) -> str:
        """The label of a replicate's block; "" without blocks."""
        return [*self.blocks][replicate % len(self.blocks)] if self.blocks else ""

    def block(self, replicate: int) -> Block:
        """The block of a replicate; without blocks an empty one."""
        return self.blocks.get(self.block_of(replicate), Block())

    def overrides(self, label: str, beta_index: int) -> dict[str, Any]:
        """What an arm changes at one beta: configuration key -> value.

        Example:
            >>> Grid({"mc": {"lr": {"by_beta": {0: 0.1, 1: 0.2}}}}, {0: 1.0, 1: 2.0}, 1).overrides("mc", 1)
            {'lr': 0.2}
        """
        arm = self.arms[label].items()
        return {key: each[str(beta_index)] if (each := by_beta(value)) else value for key, value in arm}


@dataclass(frozen=True, config=CLOSED)
class Tuning:
    """Runs of every arm at every rate and beta, from which one rate is chosen for each arm."""

    rates: Annotated[
        list[Positive], Field(min_length=3)
    ]  # the same for all arms; three, so one can be inside
    # Runs at each rate and beta, with seeds of their own; two have a spread
    replicates: Annotated[int, Field(strict=True, ge=2)] = 4
    key: Annotated[str, AfterValidator(plain_key)] = (
        "model.learning_rate"  # the configuration key of the rate
    )


@dataclass(frozen=True, config=CLOSED)
class Primary:
    """The comparison that decides: by J = reward - beta * KL, or by the KL alone."""

    control: str  # the arm the others are compared with
    alpha: Annotated[float, Field(strict=True, gt=0, lt=0.5)] = (
        0.05  # two-sided, of the family of these tests
    )
    # "objective" or "matched_kl" -> difference in reward within which arms count as equivalent; where the KL
    # decides, "kl" -> difference in nats
    margins: dict[str, Positive] = field(default_factory=dict)
    # "objective" decides by J. "kl" decides by the KL alone, lower being better: for distillation, where the
    # reference is the teacher and there is no reward.
    outcome: Literal["objective", "kl"] = "objective"

    @property
    def symbol(self) -> str:
        """What decides, on a page."""
        return "KL" if self.outcome == "kl" else "J"


@dataclass(frozen=True, config=CLOSED)
class Plan:
    """A sweep: stages in the order they depend on each other, and the grid of the last."""

    name: Name  # what progress lines and the report call it
    directory: str  # where the locked plan, the results and the working directories are kept
    stages: dict[Name, Stage]  # a stage may start from those above it
    grid: Grid  # the cells of the last stage
    primary: Primary
    root_seed: Count = 0  # the root of every seed
    threads: Threads = 1  # threads each cell computes with
    module: str = "lit_klrb"  # the package whose `fit` command runs a cell
    setting: str = ""  # what is trained on what, in a sentence that the report has beside its verdict
    tuning: Tuning | None = None  # chooses a rate for each arm before the grid runs

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
        """The level of each comparison, which the smallest p of the family must not exceed."""
        return self.primary.alpha / max(1, len(self.comparisons))

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(arm, beta index, replicate) of every planned run of the grid."""
        return [*product(self.grid.arms, self.grid.beta, range(self.grid.replicates))]

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
            starts = {*self.inputs(replicate).values()}
            for name in reversed(self.stages):
                starts |= {*self.stages[name].inputs.values()} if name in starts else set()
            shared &= starts
        return [name for name in self.stages if name in shared]

    def stage_of(self, name: str) -> Stage:
        """The stage of a cell; those of the tuning stage are trials of the last."""
        *_, last = self.stages
        return self.stages[last if name == TUNING else name]

    def threads_of(self, stage: str) -> int:
        """Threads that each process of a stage's cells computes with."""
        return self.stage_of(stage).threads or self.threads

    def overrides(self, point: Point | Trial) -> dict[str, Any]:
        """Configuration key -> the value that block, arm and rate give a run of the last stage."""
        of_arm = self.grid.overrides(point.arm, point.beta_index)
        rate = {self.tuning.key: point.rate} if self.tuning and isinstance(point, Trial) else {}
        return {**self.grid.block(point.replicate).overrides, **of_arm, **rate}

    def title(self, point: tuple[str, int, int]) -> str:
        """The name of a run of the grid on a page."""
        arm, index, replicate = point
        return f"{arm}, β = {self.grid.beta[index]:g}, replicate {replicate}"

    def inputs(self, replicate: int) -> dict[str, str]:
        """Configuration key -> the stage whose checkpoint a run of the last stage receives."""
        *_, last = self.stages.values()
        return last.inputs | self.grid.block(replicate).inputs

    def record(self) -> dict[str, Any]:
        """Its written form in the locked plan, without the directory, the GPUs and what is empty."""
        design = asdict(self)
        del design["directory"]
        if self.tuning is None:
            del design["tuning"]
        for stage in design["stages"].values():
            del stage["gpus"]
            for key in ("command", "threads"):
                if stage[key] in ("fit", None):
                    del stage[key]
        design["grid"]["beta"] = {str(index): beta for index, beta in self.grid.beta.items()}
        if not self.grid.blocks:
            del design["grid"]["blocks"]
        return design

    @classmethod
    def of_record(cls, record: Mapping[str, Any], directory: str) -> "Plan":
        """Create a plan from its written form; raises `MALFORMED` if it is invalid."""
        # Settings without effect that plans had when most sweeps were published; their hash is of the file
        retired = ("kl_cuts", "corner", "sequential")
        primary = {key: value for key, value in record["primary"].items() if value or key not in retired}
        return cls(**{**record, "directory": directory, "primary": primary})
