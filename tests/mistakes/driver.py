"""Drives commands with wrong input, in this process, and judges how each one ends.

A mistake is a command line, and what its one line must say. `judge` runs it under an alarm, and sorts what
happens: a clear line and exit code 2, input that is rightly accepted, or one of the ways to fail a user.
"""

import contextlib
import io
import re
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

SECONDS = 60.0


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


RIGHT = {Verdict.CLEAR, Verdict.ACCEPTED}


class Mistake(NamedTuple):
    """A wrong command line.

    Args:
        argv: Its arguments; FILES/ and CHAIN/ stand for the folders of the tests' files and finished runs.
        line: A regular expression that its one line must match; None where the input is fine.
        stage: The demo's configuration that the arguments are added to; None if they are all there is.
        command: What is done with it.
        code: The exit code.
        quick: Whether the default test run tries it.
    """

    argv: Sequence[str]
    line: str | None
    stage: str | None = "rloo"
    command: str = "fit"
    code: int = 2
    quick: bool = False

    def __str__(self) -> str:
        where = f"{self.command} {self.stage}: " if self.stage else ""
        return where + " ".join(self.argv)[:100]


class Judgement(NamedTuple):
    """How a mistake ended, and what it printed."""

    verdict: Verdict
    output: str


class HangError(BaseException):
    """The alarm: a command took longer than any wrong input may."""


def judge(mistake: Mistake, run: Callable[[], int], seconds: float = SECONDS) -> Judgement:
    """Run a mistake and judge how it ends.

    Args:
        mistake: What its line must say.
        run: Runs it, and returns the exit code.
        seconds: When it counts as hung.
    """
    errors = io.StringIO()
    try:
        with _alarm(seconds), _captured(errors):
            code = run()
    except HangError:
        return Judgement(Verdict.HANG, traceback.format_exc())
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # whatever a user would see as a traceback
        return Judgement(Verdict.TRACEBACK, traceback.format_exc())
    return Judgement(_verdict(mistake, code, errors.getvalue().strip()), errors.getvalue().strip())


def _verdict(mistake: Mistake, code: int, output: str) -> Verdict:
    if mistake.line is None:
        return Verdict.ACCEPTED if code == 0 else Verdict.WRONG_CODE
    if code == 0:
        return Verdict.SILENT
    if "Traceback" in output:
        return Verdict.TRACEBACK
    if code != mistake.code:
        return Verdict.WRONG_CODE
    if len(output.splitlines()) != 1:
        return Verdict.NOISY
    return Verdict.CLEAR if re.search(mistake.line, output) else Verdict.UNHELPFUL


def summary(verdicts: Counter[Verdict]) -> str:
    """The counts in one line.

    Example:
        >>> summary(Counter({Verdict.CLEAR: 2, Verdict.HANG: 1}))
        '3 tried: 2 clear, 0 accepted rightly, 0 tracebacks, 1 hangs'
    """
    always = {Verdict.CLEAR, Verdict.ACCEPTED, Verdict.TRACEBACK, Verdict.HANG}
    parts = [f"{verdicts[kind]} {kind.value}" for kind in Verdict if kind in always or verdicts[kind]]
    return f"{verdicts.total()} tried: {', '.join(parts)}"


@contextlib.contextmanager
def _captured(errors: io.StringIO) -> Iterator[None]:
    with (
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `HangError` after some time; an alarm that was set before goes on afterwards."""

    def ring(*_: object) -> None:
        raise HangError

    handler = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)
