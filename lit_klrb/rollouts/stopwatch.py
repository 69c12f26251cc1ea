"""Measuring the time of the stages of a training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Accumulates the time of named stages while `running` is true; does nothing otherwise.

    Example:
        >>> watch = Stopwatch(running=False)
        >>> with watch("generate"):
        ...     pass
        >>> watch.running = True
        >>> with watch("reward"):
        ...     pass
        >>> list(watch.take())
        ['reward']
    """

    def __init__(self, *, running: bool) -> None:
        self.running = running
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        if not self.running:
            yield
            return
        start = now()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now() - start

    def take(self) -> dict[str, float]:
        """Seconds of each stage since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def now() -> float:
    """The time in seconds, after waiting for pending work on a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
