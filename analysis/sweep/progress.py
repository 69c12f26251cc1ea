"""Progress of a sweep: a bar in a terminal, plain lines otherwise, and the remaining time."""

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn
from rich.table import Column

from analysis.results import Cell
from analysis.results.store import read_time
from analysis.sweep.store import Store
from lit_klrb import schema


class Clock:
    """The times of finished cells by stage.

    Args:
        cells: Cells; those without a measured time are ignored.
        store: The sweep's directory.
    """

    def __init__(self, cells: Iterable[Cell], store: Store) -> None:
        self._store = store
        self._seconds: dict[str, list[float]] = {}
        for cell in cells:
            self.add(cell)

    def add(self, cell: Cell) -> None:
        """Add the time of a finished cell, if it is known: that of a resumed one is not."""
        seconds = read_time(self._store.seconds(cell.id))
        if seconds is not None:
            self._seconds.setdefault(cell.stage, []).append(seconds)

    def mean(self, stage: str) -> float | None:
        """Mean time of a cell of the stage, in seconds; None if none is known."""
        return fmean(self._seconds[stage]) if stage in self._seconds else None

    def left(self, cells: Iterable[Cell], workers: int, assumed: float | None = None) -> float | None:
        """Estimate the time until all `cells` have run, one stage after the other.

        Args:
            cells: The remaining cells.
            workers: Number of cells that run at the same time.
            assumed: Assumed time per cell of a stage without a measured time, in seconds.

        Returns:
            Seconds; None if a stage has neither a measured nor an assumed time.
        """
        total = 0.0
        for stage, count in Counter(cell.stage for cell in cells).items():
            seconds = self.mean(stage) or assumed
            if seconds is None:
                return None
            total += max(1.0, count / workers) * seconds
        return total


class Progress(Bar):
    """Reports every cell that ends, within a `with` block.

    Args:
        name: The sweep's name.
        console: The console to write to.
    """

    def __init__(self, name: str, console: Console) -> None:
        # In a narrow terminal the newest cell takes two lines, and no number is cut
        count = MofNCompleteColumn(table_column=Column(no_wrap=True))
        newest = TextColumn("{task.fields[newest]}", markup=False, table_column=Column())
        columns = TextColumn("{task.description}", markup=False), BarColumn(10), count, newest
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._task = self.add_task(name, newest="")

    def counted(self, settled: int, total: int) -> None:
        """Set the number of cells with a result and the total number."""
        self.update(self._task, completed=settled, total=total)

    def settled(self, cell: Cell, result: dict[str, Any], seconds_left: float | None) -> None:
        """Report the result of a cell, and the remaining time if it can be estimated."""
        values = {name: result["final"].get(name) for name in (schema.REWARD, schema.KL)}
        newest = f"{cell}: {result['state']}"
        newest += "".join(f", {name} {value:.4g}" for name, value in values.items() if value is not None)
        if seconds_left:
            newest += f"; {duration(seconds_left)} left"
        self.update(self._task, advance=1, newest=newest)
        if not self.console.is_terminal:
            task = self.tasks[self._task]
            self.line(f"[{task.completed:.0f}/{task.total:.0f}] {newest}")

    def failed(self, cell: Cell, error: str, given_up: bool) -> None:
        """Report an attempt without a result, with the end of the log if it was the last attempt."""
        reason, *log = error.splitlines()
        self.line(f"{cell}: {reason}; {'given up' if given_up else 'it is run again'}")
        for text in log if given_up else ():
            self.line(f"    {text}")

    def line(self, text: str) -> None:
        """Write a line without markup, above the bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


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
