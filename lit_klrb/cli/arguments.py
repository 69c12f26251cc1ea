"""The argument parser of the commands that do not use Lightning."""

import argparse
from typing import Any, NoReturn

from lit_klrb.errors import ConfigurationError


class Arguments(argparse.ArgumentParser):
    """An argument parser that raises errors instead of printing them with the usage."""

    def __init__(self, command: str, description: str | None, epilog: str = "", **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        prog = f"lit-klrb {command}"
        super().__init__(prog, None, description, epilog, formatter_class=formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise the message."""
        raise ConfigurationError(f"{message}; see {self.prog} --help")
