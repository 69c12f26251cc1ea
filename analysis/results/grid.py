"""The grid of a plan: every arm at every beta in every replicate."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from analysis.results.cell import ESTIMATOR
from analysis.results.checksum import canonical

# Configuration keys of a run that the design sets.
SEED, BETA = "seed_everything", "kl.beta"
# Fewest blocks that show how much blocks differ.
FEWEST_BLOCKS = 3
# The key of a value that differs between betas: {by_beta: {index: value}}.
BY_BETA = "by_beta"


@dataclass(frozen=True)
class Block:
    """What the runs of a block share, and those of other blocks do not.

    Args:
        overrides: Configuration key -> value.
        inputs: Configuration key -> the stage whose checkpoint it receives, beside the inputs of the last
            stage or in place of them.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """The design of the last stage: every arm at every beta in every replicate.

    Args:
        arms: Label -> what the arm changes: configuration key -> value, as on the command line of `fit`, or
            `{by_beta: {index: value}}` for a value that differs between betas, such as a learning rate. In a
            plan file a list of estimators stands for arms that differ in `kl.estimator` alone.
        beta: Index -> weight of the KL. Seeds follow the index: a new weight takes a new one, and the
            others keep their seeds.
        replicates: Matched runs at each beta.
        blocks: Label -> block: warm starts, or anything else on which statements should not depend. Replicate
            r belongs to block r mod B of B blocks.
    """

    arms: dict[str, dict[str, Any]]
    beta: dict[int, float]
    replicates: int
    blocks: dict[str, Block] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Indices of beta as text, as in JSON
        arms = {label: _with_text_keys(overrides) for label, overrides in self.arms.items()}
        object.__setattr__(self, "arms", arms)

    @property
    def over_blocks(self) -> bool:
        """Whether statements are about blocks like those of the plan, and not only about these."""
        return len(self.blocks) >= FEWEST_BLOCKS

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
        return {key: _at(value, str(beta_index)) for key, value in self.arms[label].items()}

    def record(self) -> dict[str, Any]:
        """Its record in a plan; without blocks as in earlier versions."""
        design = {**asdict(self), "beta": {str(index): beta for index, beta in self.beta.items()}}
        if not self.blocks:
            del design["blocks"]
        return design

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Grid":
        """Create a grid from its record in a plan."""
        betas = {int(index): float(beta) for index, beta in record["beta"].items()}
        blocks = {label: Block(**block) for label, block in record.get("blocks", {}).items()}
        names = record.get("estimator")  # earlier versions had estimators instead of arms
        arms = record["arms"] if names is None else arms_of_estimators([str(name) for name in names])
        return cls({**arms}, betas, record["replicates"], blocks)


def by_beta(value: object) -> dict[str, Any] | None:
    """Index of beta, as text -> value; None if a value of an arm is the same at every beta."""
    if not (isinstance(value, Mapping) and list(value) == [BY_BETA] and isinstance(value[BY_BETA], Mapping)):
        return None
    return {str(index): each for index, each in value[BY_BETA].items()}


def _at(value: Any, index: str) -> Any:
    several = by_beta(value)
    return value if several is None else several[index]


def arms_of_estimators(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Convert a list of estimators to arms."""
    return {name: {ESTIMATOR: name} for name in names}


def plain_key(key: str) -> str:
    """A configuration key without `init_args`, which are optional on the command line."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def is_plain_data(value: object) -> bool:
    """Whether JSON can represent a value."""
    try:
        canonical(value)
    except ValueError:
        return False
    return True


def _with_text_keys(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What an arm changes, with the indices of beta as text, as in JSON."""
    found = {key: by_beta(value) for key, value in overrides.items()}
    return {**overrides, **{key: {BY_BETA: each} for key, each in found.items() if each is not None}}
