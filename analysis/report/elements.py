"""The elements of a report, and its HTML page, which is deterministic and needs no scripts or network."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.stats.intervals import Interval
from analysis.stats.text import aligned, aligned_ends, decimals_of
from lit_klrb.errors import printable

Item = TypeVar("Item")
# The content of a cell: text, a number, an interval, or nothing, which is a dash.
Cell = str | float | Interval | None

_NUMBER = r"[+−]?[\d.,]+(?:e[−+]?\d+)?(?: ?%)?"
_NUMERIC = re.compile(rf"{_NUMBER}(?: \({_NUMBER} to {_NUMBER}\)| to {_NUMBER})?|[–−+∞]+")


@dataclass(frozen=True)
class Table:
    """A table of text."""

    caption: str  # its content, including units
    header: Sequence[str]
    # Cells, as long as the header. Numbers and intervals of a column get the same decimals.
    rows: Sequence[Sequence[Cell]]

    @cached_property
    def cells(self) -> Sequence[Sequence[str]]:
        """The texts of the rows."""
        return list(zip(*map(_texts, zip(*self.rows, strict=True)), strict=True))

    @cached_property  # the page asks for it at every cell
    def numeric(self) -> frozenset[int]:
        """The columns that have only numbers and intervals, and are right-aligned."""
        columns = enumerate(zip(*self.cells, strict=True))
        return frozenset(column for column, cells in columns if all(map(_NUMERIC.fullmatch, cells)))

    @classmethod
    def of(cls, caption: str, items: Iterable[Item], *columns: tuple[str, Callable[[Item], Cell]]) -> "Table":
        """A table with a row for each item, from the name and the text of each column."""
        rows = [tuple(text(item) for _, text in columns) for item in items]
        return cls(caption, tuple(name for name, _ in columns), rows)


def _texts(column: Sequence[Cell]) -> list[str]:
    """The cells of a column, with the decimals that its largest number needs."""
    ends = [end for cell in column if isinstance(cell, Interval) for end in cell.ends]
    decimals = decimals_of([*(cell for cell in column if isinstance(cell, float)), *ends])
    return [
        cell
        if isinstance(cell, str)
        else aligned_ends(cell, decimals)
        if isinstance(cell, Interval)
        else aligned(cell, decimals)
        for cell in column
    ]


@dataclass(frozen=True)
class Figure:
    """A drawing with text alternatives."""

    draw: Callable[[], str]  # makes the drawing, as SVG; a page does, `verify` does not
    alt: str  # a description in one or two sentences
    caption: str  # how to read it; names the unit that n counts
    table: Table | None = None  # the numbers that it shows; None if a table of its section has them

    @cached_property
    def svg(self) -> str:
        """The drawing."""
        return self.draw()


@dataclass(frozen=True)
class Section:
    """One part of the report."""

    name: str  # its anchor on the page and its key in `results.json`
    title: str  # its heading
    paragraphs: Sequence[str] = ()  # text that is always shown
    notes: Sequence[str] = ()  # how to read the section and its assumptions, initially collapsed
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()  # tables that are always shown
    details: Sequence[Table] = ()  # tables that are initially collapsed
    glossary: Sequence[tuple[str, str]] = ()  # terms with definitions, shown with the notes
    # What it computes, for `results.json` and `verify`
    numbers: Mapping[str, Any] = field(default_factory=dict)
    exploratory: bool = False  # whether it contains no planned test


def _printable(value: Any) -> Any:
    """Text without characters that control a terminal or reorder a line, before it is escaped for HTML."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value, keep="\n\t") if is_text else value


def page(
    title: str,
    kicker: Sequence[str],
    parts: Mapping[str, Sequence[Section]],
    withheld: str = "",
    lead: str = "",
) -> str:
    """Render sections as an HTML page."""
    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    # A drawing is the data URI of an image; the page escapes it for the attribute
    safe = " !$&'()*+,-./:;=?@[]^_`{|}~"
    environment.filters["data_uri"] = lambda svg: "data:image/svg+xml," + quote(svg, safe=safe)
    return environment.get_template("report.html.j2").render(
        title=title, kicker=kicker, withheld=withheld, parts=parts, lead=lead
    )
