"""The one exception a user's input can cause."""


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
