"""Trainers in processes of their own that take turns by cycle: what else the machine does affects all."""

import math
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

from replication.studies.model_pairs import now

from .measure import DEVICE, peak_megabytes


class Clock:
    """Tells the seconds of each cycle of a trainer, which then waits for its next turn."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps, self._start = 0, math.nan

    def begin(self) -> None:
        """The trainer has read its model and data, and waits for its first turn."""
        self._connection.send(None)
        self._wait()

    def tick(self, steps: int) -> None:
        """A step of the trainer has ended, of which a cycle has a number."""
        self._steps += 1
        if self._steps % steps == 0:
            self._connection.send(now() - self._start)
            self._wait()

    def _wait(self) -> None:
        self._connection.recv()
        self._start = now()


# Trains for a number of cycles, begins and ticks after each step, and returns the shares of its stages
Training = Callable[[Clock, int], dict[str, float]]


class Trained(NamedTuple):
    """Seconds of each cycle, shares of its stages, and the peak of memory in MB, the model included."""

    seconds: list[float]
    shares: dict[str, float]
    megabytes: float


def take_turns(trainings: Sequence[Training], cycles: int) -> list[Trained]:
    """Train, each for one cycle at a time; models and data are read side by side.

    Raises:
        EOFError: If a training ends early; it prints why.
    """
    # A server of imports, which take longer than a cycle of a small model; not on a GPU, which forbids forks
    context = get_context("forkserver" if DEVICE.type == "cpu" else "spawn")
    context.set_forkserver_preload(["benchmarks.step_runs"])
    pipes = [context.Pipe() for _ in trainings]
    processes = [
        context.Process(target=_train, args=(training, cycles, theirs), daemon=True)
        for training, (_, theirs) in zip(trainings, pipes, strict=True)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    connections = [ours for ours, _ in pipes]
    for connection in connections:
        connection.recv()
    found: list[list[float]] = [[] for _ in trainings]
    for _ in range(cycles):
        for connection, seconds in zip(connections, found, strict=True):
            connection.send(None)
            seconds.append(connection.recv())
    for connection in connections:
        connection.send(None)
    rest = [connection.recv() for connection in connections]
    return [Trained(seconds, *more) for seconds, more in zip(found, rest, strict=True)]


def _train(training: Training, cycles: int, connection: Connection) -> None:
    warnings.simplefilter("ignore")
    shares: list[dict[str, float]] = []
    megabytes = peak_megabytes(lambda: None, lambda: shares.append(training(Clock(connection), cycles)))
    connection.send((*shares, megabytes))
