"""Warnings of a run: the first of each kind is shown."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def once_of_a_kind() -> Iterator[None]:
    """Show only the first warning that comes from a line of code, while the block runs.

    Python itself repeats a warning whose text differs, if only in a number: thousands in a long run.
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
