"""Suppression of repeated warnings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def once_of_a_kind() -> Iterator[None]:
    """Show only the first warning from each line of code while the block runs.

    Python repeats warnings whose text differs, even if only in a number: thousands in a long run.
    """
    show = warnings.showwarning
    shown: set[tuple[type[Warning], str, int]] = set()

    def show_once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        kind = category, filename, lineno
        if kind not in shown:
            shown.add(kind)
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show
