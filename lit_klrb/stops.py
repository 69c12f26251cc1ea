"""Ctrl-C and SIGTERM: what a process does when it is asked to stop."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
# Progress bars hide a terminal's cursor.
SHOW_CURSOR = b"\x1b[?25h"


class Stopped(BaseException):
    """The process was asked to stop.

    Args:
        number: The signal that asked.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {SIGNALS[signal.Signals(number)]}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


class Stops:
    """Answers to Ctrl-C and SIGTERM while a block runs; the second one ends the process at once.

    A signal that the process was started to ignore is still ignored.

    Args:
        later: Only note the first one in `asked`, for the block to stop where it is safe, and print this
            text. Without it `Stopped` is raised wherever the program is.
    """

    # Whether a second signal ends the process at once. In the processes of a sweep it does not: a process
    # manager may signal all of them, and the coordinator then does so, too.
    at_once = True

    def __init__(self, later: str = "") -> None:
        self.later = later
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Begin to listen."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let whoever listened before listen again."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            if not self.at_once:
                return
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            os._exit(128 + number)
        self.asked = number
        if not self.later:
            raise Stopped(number)
        # `print` cannot be used here: the signal may have interrupted one.
        os.write(2, f"{self.later}\n".encode())
