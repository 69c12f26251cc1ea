"""Estimates of the remaining time of a sweep."""

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from analysis.results import Cell
from analysis.results.store import read_time
from analysis.sweep.store import Store


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
        return mean(self._seconds[stage]) if stage in self._seconds else None

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
