"""Runs commands with wrong input, each in its own process, and says what is wrong with how one ends.

A mistake is a command line with the error line that is expected. `judge` runs it in a fork of this process,
which has imported everything: mistakes do not affect each other, and one that hangs is killed.
"""

import contextlib
import io
import json
import logging
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

SECONDS = 60.0
GIGABYTES = 8
# A child that neither answers nor dies at its alarm is ended after so many seconds more.
GRACE = 5.0


class Mistake(NamedTuple):
    """A wrong command line.

    Args:
        argv: Its arguments; FILES, CHAIN and RUN stand for the folders of the tests' files, of finished runs
            and of the run to be made.
        line: A regular expression that its one line must match; None where the input is fine.
        stage: The demo's configuration that the arguments are added to; None if they are all there is.
        quick: Whether the default test run tries it.
    """

    argv: Sequence[str]
    line: str | None
    stage: str | None = "rloo"
    quick: bool = False

    def __str__(self) -> str:
        where = f"{self.stage}: " if self.stage else ""
        return where + " ".join(self.argv)[:100]


def judge(mistake: Mistake, run: Callable[[], int], seconds: float = SECONDS) -> tuple[str, str]:
    """Run a mistake in a fork of this process.

    Args:
        mistake: What its line must say.
        run: Runs it, and returns the exit code.
        seconds: When it counts as hung.

    Returns:
        What is wrong with how it ended, "" if nothing is, and what it printed to standard error.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(run, seconds, writing)
    os.close(writing)
    with contextlib.closing(os.fdopen(reading, "rb", buffering=0)) as answer:
        said = _read(answer, seconds + GRACE)
    if said is None:
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if usage.ru_maxrss > GIGABYTES << 20:
        return f"it takes {usage.ru_maxrss / 2**20:.1f} GiB", ""
    if said is None:
        return f"it does not end within {seconds:g} s, nor at an alarm", ""
    if not said:
        return f"the process died: wait status {status}", ""
    wrong, code, output = json.loads(said)
    return wrong or complaint(mistake, code, output), output


def complaint(mistake: Mistake, code: int, output: str) -> str:
    """What is wrong with a command that did end, by its exit code and what it printed to standard error."""
    lines = len(output.splitlines())
    if mistake.line is None:
        return "" if code == 0 else f"exit code {code} for what is fine"
    if code != 2:
        return f"exit code {code}"
    if lines != 1:
        return f"{lines} lines"
    return "" if re.search(mistake.line, output) else f"a line without {mistake.line}"


class _HangError(BaseException):
    """The alarm: a command took longer than any wrong input may."""


def _ring(*_: object) -> None:
    raise _HangError


def _answer(run: Callable[[], int], seconds: float, writing: int) -> None:
    """The child: run, say how it ended, and end without a trace of the parent's own exit."""
    try:
        os.setpgid(0, 0)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it would warn of the fork
        answer = json.dumps(_ended(run, seconds)).encode()
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _ended(run: Callable[[], int], seconds: float) -> tuple[str, int, str]:
    """A complaint, or "" if the exit code and the output decide; both."""
    import torch

    logging.disable(logging.WARNING)  # the error is one line, after any warnings
    torch.set_num_threads(1)  # the threads of the parent's pool are not in the fork
    errors = io.StringIO()
    signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    sys.stderr, sys.stdout = errors, io.StringIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = run()
    except _HangError:
        return f"it does not end within {seconds:g} s", 0, traceback.format_exc()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # whatever a user would see as a traceback
        return "a traceback", 1, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "", code, errors.getvalue().strip()


def _read(answer: io.RawIOBase, seconds: float) -> bytes | None:
    """All that a pipe says until it is closed; None if that takes too long."""
    said, end = b"", time.monotonic() + seconds
    while select.select([answer], [], [], max(0.0, end - time.monotonic()))[0]:
        part = answer.read(1 << 16)
        if not part:
            return said
        said += part
    return None
