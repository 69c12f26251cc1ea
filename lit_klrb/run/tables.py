"""Tables for a terminal or a page, whose cells are data: text by models and by authors of data sets."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_klrb.errors import printable


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table in which nothing is markup, a code for an emoji, or a sequence that steers the terminal.

    Args:
        header: Names of the columns.
        rows: Cells; numbers that are not whole are shown with three significant digits.

    Example:
        >>> from rich.console import Console
        >>> Console(width=40).print(text_table(["text"], [["[/i] :smile:"]]))
        ┏━━━━━━━━━━━━━━┓
        ┃ text         ┃
        ┡━━━━━━━━━━━━━━┩
        │ [/i] :smile: │
        └──────────────┘
    """
    table = Table(show_lines=True)
    for name in header:
        table.add_column(_cell(name), overflow="fold")  # a long word is broken, not cut off
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> Text:
    return Text(printable(f"{value:.3g}" if isinstance(value, float) else str(value), keep="\n"))
