"""What a section of the report is made of. Text is plain: the page escapes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        caption: What it shows, units included.
        header: Names of the columns.
        rows: Cells, as long as the header.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A drawing with what stands in for it when it cannot be seen.

    Attributes:
        svg: The drawing.
        alt: What it shows, in a sentence or two.
        caption: How to read it; names the unit that n counts.
        table: The numbers behind it.
    """

    svg: str
    alt: str
    caption: str
    table: Table


@dataclass(frozen=True)
class Card:
    """A headline number: `value` large, `name` above and `detail` below it."""

    name: str
    value: str
    detail: str


@dataclass(frozen=True)
class Finding:
    """The conclusion of one comparison.

    Attributes:
        outcome: The outcome's value, which colours it.
        headline: The conclusion in one sentence.
        cards: Its headline numbers.
        sentences: The verdicts behind it, behind a click.
    """

    outcome: str
    headline: str
    cards: Sequence[Card] = ()
    sentences: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """One part of the report.

    Attributes:
        name: Its address in the page and in `results.json`.
        title: Its heading.
        findings: Conclusions, each from a `Verdict`.
        paragraphs: Prose, shown at once.
        notes: How to read the section and what it assumes, behind a click.
        figures: Drawings.
        tables: Tables shown at once.
        details: Tables behind a click.
        glossary: Terms with their meanings, shown with the notes.
        numbers: Everything it says, for `results.json` and its check.
        exploratory: Whether nothing here was planned as a test.
        folded: Whether all of it is behind a click.
    """

    name: str
    title: str
    findings: Sequence[Finding] = ()
    paragraphs: Sequence[str] = ()
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    glossary: Sequence[tuple[str, str]] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    exploratory: bool = False
    folded: bool = False
