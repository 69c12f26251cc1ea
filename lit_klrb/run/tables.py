"""Tables of untrusted text, for a terminal or an HTML page."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_klrb.errors import printable


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table in which text is not parsed as markup or emoji codes and cannot control the terminal.

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
        table.add_column(_cell(name), overflow="fold")  # wraps long words instead of truncating them
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> Text:
    return Text(printable(f"{value:.3g}" if isinstance(value, float) else str(value), keep="\n"))
