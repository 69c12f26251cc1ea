"""How long the rest of a sweep takes."""

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from analysis.results import Cell
from analysis.sweep.store import Store


class Clock:
    """Seconds that the cells of each stage take, from those that have finished.

    Args:
        cells: Cells to look at; those without a measured time are passed over.
        store: The sweep's directory.
    """

    def __init__(self, cells: Iterable[Cell], store: Store) -> None:
        self._store = store
        self._seconds: dict[str, list[float]] = {}
        for cell in cells:
            self.add(cell)

    def add(self, cell: Cell) -> None:
        """Take in the time of one more finished cell."""
        path = self._store.seconds(cell.id)
        if path.exists():
            self._seconds.setdefault(cell.stage, []).append(float(path.read_text()))

    def mean(self, stage: str) -> float | None:
        """Mean seconds of a cell of the stage; None before the first."""
        return mean(self._seconds[stage]) if stage in self._seconds else None

    def left(self, cells: Iterable[Cell], workers: int, assumed: float | None = None) -> float | None:
        """Seconds until all of `cells` have run, stage after stage.

        Args:
            cells: The cells left.
            workers: Cells run at the same time.
            assumed: Seconds of a cell of a stage that has no time yet.

        Returns:
            The estimate; None if a stage has no time and none is assumed.
        """
        total = 0.0
        for stage, count in Counter(cell.stage for cell in cells).items():
            seconds = self.mean(stage) or assumed
            if seconds is None:
                return None
            total += max(1.0, count / workers) * seconds
        return total
