"""The one exception a user's input can cause."""


class ConfigurationError(ValueError):
    """Wrong usage or configuration: the message is one line naming the key, the value and what is allowed.

    The command line prints it and ends with exit code 2; Python callers see an ordinary `ValueError`.
    """
