"""What is read of a split: rows are read as a whole or left out, and each that is left out is counted."""

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lit_klrb.data.encode import Encoded
from lit_klrb.data.kinds import LeftOutError, Row
from lit_klrb.errors import ConfigurationError

Overlong = Literal["leave_out", "cut", "refuse"]
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Selection:
    """The examples of a split, and the rows that are left out."""

    key: str  # the argument that names the source
    source: str  # its value
    split: str
    limit: int | None = None  # maximum number of tokens of a prompt with its answer; None for no limit
    # What is done about longer ones: leave them out, cut the end of the answer, or refuse
    overlong: Overlong = "leave_out"
    name: str = "max_tokens"  # what determines the limit, for messages
    total: int = 0
    cut: int = 0
    sha256: str = ""  # hash of what was made of the rows, in their order; "" before they are read
    lengths: list[int] = field(default_factory=list)
    # Why rows are left out, and where they are
    reasons: dict[str, list[str]] = field(default_factory=dict)

    @property
    def cut_to(self) -> int | None:
        """The length to which longer texts are cut; None if they are not."""
        return self.limit if self.overlong == "cut" else None

    @property
    def left_out(self) -> int:
        """Number of rows that are left out."""
        return sum(map(len, self.reasons.values()))

    def read(self, rows: Iterable[Row], make: Callable[[int, Row], T]) -> list[T]:
        """What is made of each row, without those that are left out, of which more than half are refused."""
        kept = []
        for index, row in enumerate(rows):
            self.total += 1
            cut = self.cut
            try:
                if row.problem:
                    raise LeftOutError(row.problem)
                kept.append(make(index, row))
            except LeftOutError as reason:
                self.reasons.setdefault(str(reason), []).append(row.place or f"row {self.total}")
                self.cut = cut
            self.cut = min(self.cut, cut + 1)  # a row of two answers is one
        digest = hashlib.sha256()
        for example in kept:  # a tuple of plain values; of other values the type counts
            text = json.dumps(example, default=lambda value: type(value).__name__, skipkeys=True)
            digest.update(text.encode())
        self.sha256 = digest.hexdigest()
        self._conclude()
        return kept

    def within(self, encoded: Encoded, more: int = 0) -> Encoded:
        """A text of at most `limit` tokens: longer ones are left out, cut or refused."""
        length = len(encoded.ids) + more
        if self.limit is not None and length > self.limit:
            if self.overlong == "refuse":
                problem = f"{self.source} has a {self.split} row of {length} tokens"
                raise ConfigurationError(f"{problem}; {self.name}={self.limit}", key="overlong")
            if self.overlong == "leave_out" or more:
                raise LeftOutError(f"longer than {self.name}={self.limit}")
            encoded = Encoded(encoded.ids[: self.limit], encoded.mask[: self.limit])
            if not any(encoded.mask):
                raise LeftOutError(f"a prompt as long as {self.name}={self.limit}")
            self.cut += 1
        self.lengths.append(len(encoded.ids))
        return encoded

    def _conclude(self) -> None:
        """Say what is left out, and refuse more than half."""
        rows = f"{self.total} {self.split} rows"
        if self.cut:
            limit = f"{self.name}={self.limit}"
            log.warning(f"{self.source}: the answers of {self.cut} of {rows} are cut to {limit}")
        about = f"{self.source}: {self.left_out} of {rows}"
        why = ", ".join(f"{len(places)} {reason} ({places[0]})" for reason, places in self.reasons.items())
        if 2 * self.left_out > self.total:
            raise ConfigurationError(f"{about} cannot be read: {why}", key=self.key)
        if self.left_out:
            log.warning(f"{about} are left out: {why}")

    def summary(self) -> dict[str, Any]:
        """Numbers for `check`."""
        return {
            "rows": self.total,
            "left_out": {reason: len(places) for reason, places in self.reasons.items()},
            "cut": self.cut,
            "median_tokens": statistics.median(self.lengths or [0]),
            "longest_tokens": max(self.lengths, default=0),
        }


def context_length(model: Any) -> int | None:
    """The number of tokens that a model can read; None without a limit."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def check_context_length(model: Any, length: int, name: str, *, key: str, given: str = "") -> None:
    """Check that a model can read a sequence."""
    limit = context_length(model)
    if limit is not None and length > limit:
        given = given or f"a sequence of {length} tokens"
        raise ConfigurationError(f"{given} exceeds {name}'s context length, {limit}", key=key)
