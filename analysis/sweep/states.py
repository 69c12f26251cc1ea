"""The states of the cells of a sweep."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from pathlib import Path

from analysis.results import Cell, DamagedFileError
from analysis.sweep.store import Store
from lit_klrb import schema


class State(Enum):
    """The state of a cell."""

    TODO = "todo"
    RUNNING = "running"
    DONE = schema.DONE
    DIVERGED = schema.DIVERGED
    FAILED = "failed"
    BLOCKED = "blocked"


# States in which a cell has a result.
SETTLED = (State.DONE, State.DIVERGED)


class States(dict[str, State]):
    """The state of each cell by its id; finds those in a state without a look at all others.

    Args:
        found: The states, in the order of the cells.

    Example:
        >>> states = States({"a": State.TODO, "b": State.DONE, "c": State.TODO})
        >>> states["b"] = State.TODO
        >>> states.of(State.TODO)
        ['a', 'b', 'c']
    """

    def __init__(self, found: Mapping[str, State]) -> None:
        super().__init__(found)
        self._ids = [*found]
        self._place = {cell: place for place, cell in enumerate(found)}
        self._places: dict[State, list[int]] = {state: [] for state in State}
        for place, state in enumerate(found.values()):
            self._places[state].append(place)

    def __setitem__(self, cell: str, state: State) -> None:
        place, before = self._place[cell], self._places[self[cell]]
        del before[bisect_left(before, place)]
        insort(self._places[state], place)
        super().__setitem__(cell, state)

    def of(self, *states: State) -> list[str]:
        """The ids of the cells in one of these states, in the order of the cells."""
        return [self._ids[place] for place in sorted(chain(*map(self._places.__getitem__, states)))]


@dataclass
class Ended:
    """How a sweep ended."""

    states: dict[str, State]  # cell id -> state
    reasons: dict[str, str] = field(default_factory=dict)  # cell id -> why it is blocked
    ran: int = 0  # number of cells that this call ran to a result
    # Results that differ from the published result of the same cell
    refused: list[Path] = field(default_factory=list)
    stopped: bool = False  # whether it was stopped before its end

    @property
    def complete(self) -> bool:
        """Whether every cell has exactly one result."""
        return not self.refused and {*self.states.values()} <= {*SETTLED}


def survey(cells: Sequence[Cell], store: Store) -> dict[str, State]:
    """Determine the state of each cell from the published results, which are checked.

    Raises:
        DamagedFileError: If published results were changed; one line for each.
    """
    states: dict[str, State] = {}
    required: set[str] = set()
    damaged: list[str] = []
    for cell in reversed(cells):
        try:
            result = store.result(cell.id)
        except DamagedFileError as error:
            damaged.append(str(error))
            continue
        if result is not None and store.is_settled(cell.id, cell.id in required):
            states[cell.id] = State(result["state"])
        else:
            states[cell.id] = State.TODO
            required.update(cell.needs)
    if damaged:
        raise DamagedFileError("\n".join(damaged))
    return states
