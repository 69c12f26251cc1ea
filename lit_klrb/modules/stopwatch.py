"""Where the time of a step goes, stage by stage, for whoever asks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds of named stages while it is running; otherwise it does nothing, and costs nothing.

    Example:
        >>> watch = Stopwatch()
        >>> with watch("generate"):
        ...     pass
        >>> watch.running = True
        >>> with watch("reward"):
        ...     pass
        >>> list(watch.take())
        ['reward']
    """

    def __init__(self) -> None:
        self.running = False
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count what happens inside towards a stage."""
        if not self.running:
            yield
            return
        start = now()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now() - start

    def take(self) -> dict[str, float]:
        """Seconds of every stage since they were last taken."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def now() -> float:
    """Seconds on a clock that waits for a GPU to have done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
