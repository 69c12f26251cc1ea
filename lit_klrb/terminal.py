"""What commands print: tables of untrusted text, what is being loaded, and notes."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from lit_klrb.errors import printable

if TYPE_CHECKING:  # rich is imported where a table is drawn, as the core works without it
    from rich.table import Table
    from rich.text import Text

_NUMBER = re.compile(r"[-−]?\d.*|-|")
# Cells from this length on are text that wraps
_LONG = 40
_SAID: set[str] = set()


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]], lines: bool = True) -> "Table":
    """A table in which text is not parsed as markup or emoji codes and cannot control the terminal.

    Floats are shown with three significant digits.

    Example:
        >>> from rich.console import Console
        >>> Console(width=40).print(text_table(["text"], [["[/i] :smile:"]]))
        ┏━━━━━━━━━━━━━━┓
        ┃ text         ┃
        ┡━━━━━━━━━━━━━━┩
        │ [/i] :smile: │
        └──────────────┘
    """
    from rich import box
    from rich.table import Table

    style = {} if lines else {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(show_lines=lines, **style)  # type: ignore[arg-type]
    for name in header:
        table.add_column(_cell(name), overflow="fold")  # wraps long words instead of truncating them
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as the terminal, and one tab-separated line per row to a pipe."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            print("\t".join(map(printable, row)))
        return
    from rich.console import Console

    console = Console()
    table = text_table(header, rows, lines=False)
    cells = [[str(name), *(row[column] for row in rows)] for column, name in enumerate(header)]
    # Where several columns wrap, an empty line is between rows
    table.leading = int(sum(any(len(cell) >= _LONG for cell in column) for column in cells) > 1)
    widths = [max(map(len, column)) for column in cells]
    words = [max(len(word) for text in column for word in [*text.split(), ""]) for column in cells]
    space = console.width - 2 * len(cells) - 1
    # The widest columns wrap first, and no word is broken where that is possible
    while sum(widths) > space and widths != words:
        widest = max(range(len(cells)), key=lambda column: (widths[column] > words[column], widths[column]))
        widths[widest] -= 1
    for column, texts, width in zip(table.columns, cells, widths, strict=True):
        column.justify = "right" if all(map(_NUMBER.fullmatch, texts[1:])) else "left"
        column.width = width if sum(widths) <= space else None
    console.print(table)


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Print sentences: on a terminal wrapped at words, with further lines indented; to a pipe as they are.

    Args:
        lines: The sentences. Not errors, whose commands are copied from the terminal.
        stream: Where to; standard output if not given.
    """
    stream = stream or sys.stdout
    width = shutil.get_terminal_size().columns
    for line in "\n".join(lines).split("\n"):
        if stream.isatty() and len(line) > width:
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            line = textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
        print(line, file=stream)


def say_once(line: str) -> None:
    """Say what a run does in another way than asked or expected, once, by the first of several processes."""
    from lightning.pytorch.utilities import rank_zero_only

    if line not in _SAID:
        _SAID.add(line)
        rank_zero_only(print)(f"note: {line}", file=sys.stderr, flush=True)


def say_loading(what: str) -> None:
    """Say on a terminal what is being loaded or computed, such as "loading torch", as it can take seconds."""
    if sys.stderr.isatty():
        print(printable(f"{what} ..."), file=sys.stderr, flush=True)


def _cell(value: Any) -> "Text":
    from rich.text import Text

    return Text(printable(f"{value:.3g}" if isinstance(value, float) else str(value), keep="\n"))
