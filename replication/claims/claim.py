"""A claim and what was found about it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from replication.claims.evidence import Evidence


class Status(Enum):
    """What the evidence says about a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    ONLY_IF = "holds only if"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Number:
    """A number of a page.

    Attributes:
        what: Its meaning and unit.
        published: The published value, or "–".
        ours: Ours, with interval.
    """

    what: str
    published: str
    ours: str


@dataclass(frozen=True)
class Ruling:
    """What was found about a claim.

    Attributes:
        verdict: The verdict.
        condition: Completes "holds only if"; otherwise one sentence of explanation.
        numbers: The numbers on which the verdict is based.
    """

    verdict: Status
    condition: str
    numbers: tuple[Number, ...]

    @property
    def headline(self) -> str:
        """The verdict as a sentence."""
        text = self.verdict.value[0].upper() + self.verdict.value[1:]
        return f"{text} {self.condition}" if self.verdict is Status.ONLY_IF else f"{text}. {self.condition}"


@dataclass(frozen=True)
class Citation:
    """Where a claim is from.

    Attributes:
        reference: Authors, title, and identifier.
        read: What was read of it.
        code: The released code with its commit; empty if there is none.
    """

    reference: str
    read: str
    code: str = ""


@dataclass(frozen=True)
class PublishedClaim:
    """A claim of the literature, or of this package.

    Attributes:
        key: The name of its page.
        title: Its heading.
        quote: The claim; in quotation marks where it is verbatim.
        source: Where it is from.
        ran: What was run.
        differences: How the set-up differs from the source's.
        decide: Computes the ruling from the evidence.
    """

    key: str
    title: str
    quote: str
    source: Citation
    ran: str
    differences: str
    decide: Callable[[Evidence], Ruling]

    def __str__(self) -> str:
        return self.key
