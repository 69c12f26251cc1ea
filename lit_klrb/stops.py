"""Handling of Ctrl-C and SIGTERM."""

import math
import os
import signal
import subprocess
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
# What a job of SLURM asks for before its time is over, with --signal=USR1@90; only heard in one.
WARNING, JOB = signal.SIGUSR1, "SLURM_JOB_ID"
# When SLURM ends the job, and the lead that it should give, as a multiple of the time that a save takes.
END, LEAD = "SLURM_JOB_END_TIME", 3
NAMES: dict[int, str] = {int(number): name for number, name in SIGNALS.items()} | {WARNING: "SIGUSR1"}
# Progress bars hide a terminal's cursor.
SHOW_CURSOR = b"\x1b[?25h"


class Stopped(BaseException):
    """The process received Ctrl-C or SIGTERM.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {NAMES[number]}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.number

    def requeued(self) -> str | None:
        """Put the job of SLURM back into its queue after its warning; a line that says so, or why not."""
        job = os.environ.get(JOB)
        if self.number != WARNING or job is None or os.environ.get("SLURM_PROCID", "0") != "0":
            return None
        try:
            subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            return f"SLURM's job {job} is not requeued: {' '.join(reason.split())}"
        return f"SLURM's job {job} is requeued"


def lead_line(save: float, since: float) -> str | None:
    """A line on a job of SLURM that ends before its checkpoint is saved; None if it does not, or may not.

    Args:
        save: Seconds that a save took.
        since: Seconds since the warning.

    Example:
        >>> os.environ[END] = str(int(time.time()))
        >>> print(lead_line(save=30.0, since=5.0))
        SLURM ends this job in 0 s, and a save took 30 s: submit it with --signal=USR1@95 or more
        >>> os.environ[END] = str(int(time.time()) + 60)
        >>> lead_line(save=2.0, since=5.0), os.environ.pop(END) and None
        (None, None)
    """
    end = os.environ.get(END, "")
    if not end.isdecimal() or (left := int(end) - time.time()) >= save:
        return None
    needed = math.ceil(LEAD * save + since)
    took = f"and a save took {save:.0f} s: submit it with --signal=USR1@{needed} or more"
    return f"SLURM ends this job in {max(0.0, left):.0f} s, {took}"


class Stops:
    """Handles Ctrl-C and SIGTERM while a block runs; a second signal ends the process at once.

    Signals that the process ignored before are still ignored.

    Args:
        later: If given, the first signal is only recorded in `asked`, for the block to stop at a safe point,
            and this text is printed. Otherwise it raises `Stopped` immediately.
    """

    # Whether a second signal ends the process at once. Not in the processes of a sweep, which a process
    # manager may signal, and then the coordinator too.
    at_once = True

    def __init__(self, later: str = "") -> None:
        self.later = later
        self.asked: int | None = None
        self.asked_at = 0.0  # when, as of `time.monotonic`
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (*SIGNALS, *([WARNING] if JOB in os.environ else [])):
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            if not self.at_once:
                return
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            # A save that is cut off by the end of the job's time leaves the checkpoint before it
            if (line := Stopped(self.asked).requeued()) is not None:
                os.write(2, f"{line}\n".encode())
            os._exit(128 + number)
        self.asked, self.asked_at = number, time.monotonic()
        if not self.later:
            raise Stopped(number)
        # `print` cannot be used here: the signal may have interrupted one.
        os.write(2, f"{self.later}\n".encode())
