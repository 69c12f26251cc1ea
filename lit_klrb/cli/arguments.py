"""The argument parser of the commands that do not use Lightning."""

import argparse
from typing import NoReturn

from lit_klrb.errors import ConfigurationError


class Arguments(argparse.ArgumentParser):
    """An argument parser that raises errors instead of printing them with the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise the message.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(f"{message}; see {self.prog} --help")
