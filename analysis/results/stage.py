"""A stage of training in a plan."""

from dataclasses import asdict, dataclass, field
from typing import Any

# The commands of a stage: the training of a run, and a study, which trains nothing.
FIT, STUDY = "fit", "study"


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

    @property
    def trains(self) -> bool:
        """Whether it leaves a checkpoint, from which others can start."""
        return self.command == FIT

    def record(self) -> dict[str, Any]:
        """Its record in the locked plan; the command is omitted if it is fit, as in earlier versions."""
        design = asdict(self)
        if self.command == FIT:
            del design["command"]
        return design
