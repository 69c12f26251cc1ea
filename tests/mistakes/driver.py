"""Runs commands with wrong input, each in its own process, and judges how each one ends.

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
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

SECONDS = 60.0
MEMORY = 8 * 2**30
# A child that neither answers nor dies at its alarm is ended after so many seconds more.
GRACE = 5.0


class Verdict(Enum):
    """How a command with wrong input can end."""

    CLEAR = "clear"
    ACCEPTED = "accepted rightly"
    UNHELPFUL = "one line that does not help"
    NOISY = "more than one line"
    SILENT = "accepted wrongly"
    WRONG_CODE = "another exit code"
    TRACEBACK = "tracebacks"
    HANG = "hangs"
    MEMORY = "more than eight gigabytes"
    OUTSIDE = "code run, or something outside read, written or deleted"


RIGHT = {Verdict.CLEAR, Verdict.ACCEPTED}


class Mistake(NamedTuple):
    """A wrong command line.

    Args:
        argv: Its arguments; FILES, CHAIN and RUN stand for the folders of the tests' files, of finished runs
            and of the run to be made.
        line: A regular expression that its one line must match; None where the input is fine.
        stage: The demo's configuration that the arguments are added to; None if they are all there is.
        command: What is done with it.
        code: The exit code; None for 2, and for 0 where the input is fine.
        quick: Whether the default test run tries it.
        program: The package whose command line it is.
        make: Writes a stranger's file into a folder; the command may accept it.
        name: Stands for the arguments where those of many mistakes are the same.
    """

    argv: Sequence[str]
    line: str | None
    stage: str | None = "rloo"
    command: str = "fit"
    code: int | None = None
    quick: bool = False
    program: str = "lit_klrb"
    make: Callable[[Path], None] | None = None
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return self.name
        where = f"{self.command} {self.stage}: " if self.stage else ""
        return where + " ".join(self.argv)[:100]


class Judgement(NamedTuple):
    """How a mistake ended, what it printed, and how long it took."""

    verdict: Verdict
    output: str
    seconds: float


def judge(mistake: Mistake, run: Callable[[], int], seconds: float = SECONDS) -> Judgement:
    """Run a mistake in a fork of this process and judge how it ends.

    Args:
        mistake: What its line must say.
        run: Runs it, and returns the exit code.
        seconds: When it counts as hung.
    """
    started = time.monotonic()
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
    took = time.monotonic() - started
    if usage.ru_maxrss > MEMORY // 1024:
        return Judgement(Verdict.MEMORY, f"{usage.ru_maxrss / 2**20:.1f} GiB", took)
    if said is None:
        return Judgement(Verdict.HANG, f"did not end within {seconds:g} s, nor at an alarm", took)
    if not said:
        return Judgement(Verdict.TRACEBACK, f"the process died: wait status {status}", took)
    kind, code, output = json.loads(said)
    return Judgement(Verdict[kind] if kind else verdict_of(mistake, code, output), output, took)


def verdict_of(mistake: Mistake, code: int, output: str) -> Verdict:
    """How a command ended that did end, by its exit code and what it printed to standard error."""
    if mistake.make is not None and code == 0:
        return Verdict.ACCEPTED
    lines = len(output.splitlines())
    if mistake.make is not None and "Traceback" not in output and (lines == 1 or _verified(mistake, code)):
        return Verdict.CLEAR
    if mistake.line is None:
        return Verdict.ACCEPTED if code == (mistake.code or 0) else Verdict.WRONG_CODE
    if "Traceback" in output:
        return Verdict.TRACEBACK
    if code == 0:
        return Verdict.SILENT
    if code != (mistake.code or 2):
        return Verdict.WRONG_CODE
    if len(output.splitlines()) != 1:
        return Verdict.NOISY
    return Verdict.CLEAR if re.search(mistake.line, output) else Verdict.UNHELPFUL


def _verified(mistake: Mistake, code: int) -> bool:
    """Whether a command printed differences that it found, to standard output."""
    return mistake.argv[0] == "verify" and code in (1, 3)


def summary(verdicts: Counter[Verdict]) -> str:
    """The counts in one line.

    Example:
        >>> summary(Counter({Verdict.CLEAR: 2, Verdict.HANG: 1}))
        '3 tried: 2 clear, 0 accepted rightly, 0 tracebacks, 1 hangs'
    """
    always = {Verdict.CLEAR, Verdict.ACCEPTED, Verdict.TRACEBACK, Verdict.HANG}
    parts = [f"{verdicts[kind]} {kind.value}" for kind in Verdict if kind in always or verdicts[kind]]
    return f"{verdicts.total()} tried: {', '.join(parts)}"


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
    """The name of a verdict, or "" if the exit code and the output decide; both."""
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
        return Verdict.HANG.name, 0, traceback.format_exc()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # whatever a user would see as a traceback
        return Verdict.TRACEBACK.name, 1, traceback.format_exc()
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
