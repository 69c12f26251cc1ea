"""What is read of a split: rows are read as a whole or left out, and each that is left out is counted."""

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lit_klrb.data.chat import LeftOutError
from lit_klrb.data.encode import Encoded
from lit_klrb.data.kinds import Row
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

    def read(self, rows: Sequence[Row], make: Callable[[int, Row], T]) -> list[T]:
        """What is made of each row, without those that are left out, of which more than half are refused."""
        kept = []
        for index, row in enumerate(rows):
            cut = self.cut
            try:
                if row.problem:
                    raise LeftOutError(row.problem)
                kept.append(make(index, row))
            except LeftOutError as reason:
                self.reasons.setdefault(str(reason), []).append(row.origin or f"row {index + 1}")
                self.cut = cut
            self.cut = min(self.cut, cut + 1)  # a row of two answers is one
        self.total = len(rows)
        digest = hashlib.sha256()
        for example in kept:  # a tuple of plain values; of other values the type counts
            text = json.dumps(example, default=lambda value: type(value).__name__, skipkeys=True)
            digest.update(text.encode())
        self.sha256 = digest.hexdigest()
        if self.cut:
            rest = f"of {self.total} {self.split} rows are cut to {self.name}={self.limit}"
            log.warning(f"{self.source}: the answers of {self.cut} {rest}")
        self.refuse_half()
        if self.left_out:
            log.warning(self._line("are left out"))
        return kept

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse rows of which more than half are of no known form, before anything else is done."""
        for row in (row for row in rows if row.problem):
            self.reasons.setdefault(row.problem, []).append(row.origin)
        self.total = len(rows)
        self.refuse_half()

    def refuse_half(self) -> None:
        """Refuse rows if more than half are left out."""
        if 2 * self.left_out > self.total:
            key = None if self.key == self.source else self.key  # the line begins with the source
            raise ConfigurationError(self._line("cannot be read"), key=key)

    def _line(self, what: str) -> str:
        """How many rows are left out, and why: the three most frequent reasons."""
        ordered = sorted(self.reasons.items(), key=lambda item: -len(item[1]))
        why = [f"{len(rows)} {reason} ({rows[0]})" for reason, rows in ordered[:3]]
        more = [f"{sum(len(rows) for _, rows in ordered[3:])} for other reasons"] * (len(ordered) > 3)
        count = f"{self.left_out} of {self.total} {self.split} rows"
        return f"{self.source}: {count} {what}: {', '.join([*why, *more])}"

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

    def summary(self) -> dict[str, Any]:
        """Numbers for `check`."""
        return {
            "rows": self.total,
            "left_out": {reason: len(rows) for reason, rows in self.reasons.items()},
            "cut": self.cut,
            "median_tokens": statistics.median(self.lengths or [0]),
            "longest_tokens": max(self.lengths, default=0),
        }


def context_length(model: Any) -> int | None:
    """The number of tokens that a model can read; None without a limit."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def check_context_length(model: Any, length: int, name: str, *, key: str, sequence: str = "") -> None:
    """Check that a model can read a sequence."""
    limit = context_length(model)
    if limit is not None and length > limit:
        sequence = sequence or f"a sequence of {length} tokens"
        raise ConfigurationError(f"{sequence} exceeds {name}'s context length, {limit}", key=key)
