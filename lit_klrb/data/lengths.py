"""What is read of a split: rows are read as a whole or left out, and each that is left out is counted."""

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lit_klrb.data.encode import Encoded, LeftOutError
from lit_klrb.data.kinds import Row
from lit_klrb.errors import ConfigurationError

Overlong = Literal["leave_out", "cut", "refuse"]
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Selection:
    """The examples of a split, and the rows that are left out.

    Args:
        key: The argument that names the source.
        source: The source.
        split: Its split.
        limit: Maximum number of tokens of a prompt with its answer; None for no limit.
        overlong: What is done about longer ones: leave them out, cut the end of the answer, or refuse.
        name: What determines the limit, for messages.

    Attributes:
        sha256: Hash of what was made of the rows, in their order; "" before they are read.
    """

    key: str
    source: str
    split: str
    limit: int | None = None
    overlong: Overlong = "leave_out"
    name: str = "max_tokens"
    total: int = 0
    cut: int = 0
    sha256: str = ""
    lengths: list[int] = field(default_factory=list)
    # Why rows are left out, and where they are
    reasons: dict[str, list[str]] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """Number of rows that are left out."""
        return sum(map(len, self.reasons.values()))

    def read(self, rows: Iterable[Row], make: Callable[[int, Row], T]) -> list[T]:
        """What is made of each row, without those that are left out.

        Raises:
            ConfigurationError: If more than half are left out.
        """
        kept = []
        for index, row in enumerate(rows):
            self.total += 1
            try:
                kept.append(make(index, row))
            except LeftOutError as reason:
                self.reasons.setdefault(str(reason), []).append(row.place or f"row {self.total}")
        self.sha256 = _hash_of(kept)
        self.conclude()
        return kept

    def within(self, encoded: Encoded, more: int = 0) -> Encoded:
        """A text of at most `limit` tokens.

        Raises:
            LeftOutError: If it is longer, or nothing of its answer is left.
            ConfigurationError: If it is longer and refused.
        """
        length = len(encoded.ids) + more
        if self.limit is not None and length > self.limit:
            if self.overlong == "refuse":
                raise ConfigurationError(
                    f"{self.source} has a {self.split} row of {length} tokens; {self.name}={self.limit}",
                    key="overlong",
                )
            if self.overlong == "leave_out" or more:
                raise LeftOutError(f"longer than {self.name}={self.limit}")
            encoded = Encoded(encoded.ids[: self.limit], encoded.mask[: self.limit])
            if not any(encoded.mask):
                raise LeftOutError(f"a prompt as long as {self.name}={self.limit}")
            self.cut += 1
        self.lengths.append(len(encoded.ids))
        return encoded

    def conclude(self) -> None:
        """Say what is left out.

        Raises:
            ConfigurationError: If it is more than half.
        """
        about = f"{self.source}: {self.left_out} of {self.total} {self.split} rows"
        if self.cut:
            log.warning(
                "%s: the answers of %d of %d %s rows are cut to %s=%s",
                self.source,
                self.cut,
                self.total,
                self.split,
                self.name,
                self.limit,
            )
        if not self.left_out:
            return
        if 2 * self.left_out > self.total:
            raise ConfigurationError(f"{about} cannot be read: {self.why()}", key=self.key)
        log.warning("%s are left out: %s", about, self.why())

    def why(self) -> str:
        """The reasons with their counts."""
        return ", ".join(f"{len(places)} {reason} ({places[0]})" for reason, places in self.reasons.items())

    def summary(self) -> dict[str, Any]:
        """Numbers for `check`."""
        lengths = self.lengths or [0]
        return {
            "rows": self.total,
            "left_out": {reason: len(places) for reason, places in self.reasons.items()},
            "cut": self.cut,
            "median_tokens": statistics.median(lengths),
            "longest_tokens": max(lengths),
        }


def context_length(model: Any) -> int | None:
    """The number of tokens that a model can read; None without a limit."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def check_context_length(model: Any, length: int, name: str, *, key: str, given: str = "") -> None:
    """Check that a model can read a sequence.

    Raises:
        ConfigurationError: If not.
    """
    limit = context_length(model)
    if limit is not None and length > limit:
        given = given or f"a sequence of {length} tokens"
        raise ConfigurationError(f"{given} exceeds {name}'s context length, {limit}", key=key)


def _hash_of(examples: Iterable[Any]) -> str:
    """SHA-256 of examples, which are tuples of plain values; of other values the type counts."""
    result = hashlib.sha256()
    for example in examples:
        result.update(json.dumps(example, default=lambda value: type(value).__name__, skipkeys=True).encode())
    return result.hexdigest()
