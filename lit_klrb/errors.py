"""The exception for wrong input, checks of numbers, and functions that make untrusted text safe to print."""

import errno
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

# Error codes of exhausted resources: the same command may work later or on another machine.
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
# Those of a file system that is on another machine and is lost.
EXHAUSTED |= {
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENODEV,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
}
# Exit code of a run that a server does not answer, and of a sweep's cell that lacks anything else outside: a
# mount, space on a disk, memory. For those a command outside a sweep, without the variable, ends with 1.
OUTAGE, CELL = 69, "LIT_KLRB_CELL"
# Invisible characters that join letters in Persian and Indic scripts and parts of emoji.
JOINERS = "\u200c\u200d"


def printable(text: str, keep: str = "") -> str:
    r"""Escape all characters that would control a terminal or reorder a line.

    Example:
        >>> print(printable("good\x1b[2J film\n"))
        good\x1b[2J film\n
    """
    return "".join(c if _is_printable(c) or c in keep else c.encode("unicode_escape").decode() for c in text)


def error_line(message: object) -> str:
    r"""The line that the command line prints for an error, whatever the message contains.

    Example:
        >>> error_line("no file two\nlines\x07.ckpt")
        'error: no file two lines\\x07.ckpt'
    """
    return f"error: {printable(' '.join(str(message).splitlines()))}"


def brief(error: BaseException) -> str:
    r"""The message of an exception as one line of at most 200 characters; of a system error its description.

    Example:
        >>> brief(ValueError("no such file:\n  config.json")), brief(KeyError("scores")), brief(KeyError())
        ('no such file: config.json', "no entry 'scores'", 'KeyError')
    """
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    if type(error) is KeyError and len(text.split()) == 1:  # the key alone
        text = f"no entry {text}"
    return textwrap.shorten(text, 200, placeholder=" ...") or type(error).__name__


def is_exhausted(error: BaseException) -> bool:
    """Whether an error is that of a full disk or another `EXHAUSTED` resource, also in libraries in Rust.

    Example:
        >>> is_exhausted(RuntimeError("I/O error: No space left on device (os error 28)"))
        True
    """
    match = re.search(r"\(os error (\d+)\)", str(error))
    return (error.errno if isinstance(error, OSError) else match and int(match[1])) in EXHAUSTED


def _is_printable(character: str) -> bool:
    category = unicodedata.category(character)
    return character in JOINERS or not (category[0] == "C" or category in ("Zl", "Zp"))


class ConfigurationError(ValueError):
    """Wrong usage or configuration, with a message of one line.

    The command line prints it and exits with code 2; in Python it is an ordinary `ValueError`.

    Args:
        message: What is wrong and what is allowed.
        key: The name of the argument in Python; the command line adds its section in the configuration.

    Example:
        >>> ConfigurationError("must be positive, got 0", key="temperature")
        ConfigurationError('temperature: must be positive, got 0')
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message if key is None else f"{key}: {message}")
        self.message, self.key = message, key


class DamagedFileError(Exception):
    """A file of a sweep that was edited, truncated, misplaced, or written by something else."""


@contextmanager
def refusing(message: str, *kinds: type[Exception], key: str | None = None) -> Iterator[None]:
    """Convert exceptions of libraries or of a user's code to a `ConfigurationError` with their reason.

    Args:
        message: What is wrong.
        kinds: The exceptions that are converted, all by default; a `ConfigurationError` passes unchanged, and
            so does what `is_exhausted`, as nothing is wrong with the input.
        key: The argument that is wrong.

    Example:
        >>> with refusing("many is no number", ValueError, key="steps"):
        ...     int("many")
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: steps: many is no number: invalid literal for int() with ...
    """
    converted = kinds or (Exception,)
    try:
        yield
    except ConfigurationError:
        raise
    except converted as error:
        if is_exhausted(error):
            raise
        raise ConfigurationError(f"{message}: {brief(error)}", key=key) from error


@contextmanager
def concerning(subject: object, *kinds: type[Exception], key: str | None = None) -> Iterator[None]:
    """Begin the message of a `ConfigurationError` with what it is about, such as a path."""
    converted: tuple[type[Exception], ...] = (ConfigurationError, *kinds)
    try:
        yield
    except converted as error:
        reason = str(error) if isinstance(error, ConfigurationError) else brief(error)
        raise ConfigurationError(f"{subject}: {reason}", key=key) from error


class NoAnswerError(ConfigurationError):
    """A server does not answer; a run that needs it can be resumed when it does."""


def check_at_least(least: int, **values: int) -> None:
    """Check that numbers are at least `least`.

    Example:
        >>> check_at_least(1, batch_size=0)
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: batch_size: must be at least 1, got 0
    """
    for name, value in values.items():
        if value < least:
            raise ConfigurationError(f"must be at least {least}, got {value}", key=name)


def check_share(**values: float) -> None:
    """Check that numbers are between 0 and 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigurationError(f"must be between 0 and 1, got {value}", key=name)


def check_positive(**values: float | None) -> None:
    """Check that numbers are positive and finite; None is skipped.

    Example:
        >>> check_positive(beta=0.1, learning_rate=float("inf"))
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: learning_rate: must be positive and finite, got inf
    """
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"must be positive and finite, got {value}", key=name)
