"""The one exception a user's input can cause, and text of unknown origin made fit to print."""

import textwrap
import unicodedata

# Join letters in Persian, in Indic scripts and in emoji, and do nothing else.
JOINERS = "\u200c\u200d"


def printable(text: str, keep: str = "") -> str:
    r"""A text with everything that would steer a terminal or reorder a line shown as an escape.

    Args:
        text: Any text.
        keep: Characters to leave as they are, such as a newline.

    Example:
        >>> print(printable("good\x1b[2J film\n"))
        good\x1b[2J film\n
    """
    return "".join(c if _is_printable(c) or c in keep else c.encode("unicode_escape").decode() for c in text)


def error_line(message: object) -> str:
    r"""What the command line prints of an error: one line, whatever the message quotes.

    Example:
        >>> error_line("no file two\nlines\x07.ckpt")
        'error: no file two lines\\x07.ckpt'
    """
    return f"error: {printable(' '.join(str(message).splitlines()))}"


def brief(error: Exception) -> str:
    r"""What a library says of a file, in one line of at most 200 characters.

    Example:
        >>> brief(ValueError("no such file:\n  config.json")), brief(KeyError())
        ('no such file: config.json', 'KeyError')
    """
    return textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__


def _is_printable(character: str) -> bool:
    category = unicodedata.category(character)
    return character in JOINERS or not (category[0] == "C" or category in ("Zl", "Zp"))


class ConfigurationError(ValueError):
    """Wrong usage or configuration: one line that says what was given and what is allowed.

    The command line prints it and exits with code 2; in Python it is an ordinary `ValueError`.

    Args:
        message: What is wrong, and what is allowed.
        key: The argument at fault, by its name in Python; the command line adds where it is in a
            configuration.

    Example:
        >>> ConfigurationError("must be positive, got 0", key="temperature")
        ConfigurationError('temperature: must be positive, got 0')
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message if key is None else f"{key}: {message}")
        self.message, self.key = message, key
