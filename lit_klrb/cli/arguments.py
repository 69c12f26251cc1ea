"""The arguments of the commands that do without Lightning."""

import argparse
from typing import NoReturn

from lit_klrb.errors import ConfigurationError


class Arguments(argparse.ArgumentParser):
    """Raises its errors, instead of printing them below a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise the message.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(f"{message}; see {self.prog} --help")
