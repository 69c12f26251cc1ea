"""The base class of studies: measurements without a training run, in parts that are kept."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar


class Study(ABC):
    """A measurement that needs no training run, such as of given checkpoints.

    It consists of parts. The command keeps the result of each finished part, so that a stopped study goes on
    with the part in which it was stopped. Parts therefore do not depend on each other, and their results are
    plain data (numbers, strings, lists, dictionaries).
    """

    name: ClassVar[str]  # of the artifact, studies/NAME.json

    @abstractmethod
    def parts(self, seed: int) -> Mapping[str, Callable[[], Any]]:
        """The measurements by name, in order."""

    @abstractmethod
    def artifact(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The artifact, from the results of the parts by name."""

    def measure(self, seed: int) -> dict[str, Any]:
        """The artifact of a study that runs to its end in one go."""
        return self.artifact({name: run() for name, run in self.parts(seed).items()})
