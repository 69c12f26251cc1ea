"""Progress of a sweep: a bar in a terminal, plain lines otherwise."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn

from analysis.results import Cell
from lit_klrb import schema


class Progress:
    """Reports every cell that ends.

    Args:
        name: The sweep's name.
        console: The console to write to.
    """

    def __init__(self, name: str, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[newest]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, newest="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def counted(self, settled: int, total: int) -> None:
        """Set the number of cells with a result and the total number."""
        self._bar.update(self._task, completed=settled, total=total)

    def settled(self, cell: Cell, result: dict[str, Any], seconds_left: float | None) -> None:
        """Report the result of a cell, and the remaining time if it can be estimated."""
        values = {name: result["final"].get(name) for name in (schema.REWARD, schema.KL)}
        newest = f"{cell}: {result['state']}"
        newest += "".join(f", {name} {value:.4g}" for name, value in values.items() if value is not None)
        if seconds_left:
            newest += f"; {duration(seconds_left)} left"
        self._bar.update(self._task, advance=1, newest=newest)
        if not self._console.is_terminal:
            task = self._bar.tasks[self._task]
            self.line(f"[{task.completed:.0f}/{task.total:.0f}] {newest}")

    def failed(self, cell: Cell, error: str, given_up: bool) -> None:
        """Report an attempt without a result, with the end of the log if it was the last attempt."""
        reason, *log = error.splitlines()
        self.line(f"{cell}: {reason}; {'given up' if given_up else 'it is run again'}")
        for text in log if given_up else ():
            self.line(f"    {text}")

    def line(self, text: str) -> None:
        """Write a line without markup, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds.

    Example:
        >>> duration(8), duration(200), duration(7500)
        ('8 s', '3 min 20 s', '2 h 05 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
