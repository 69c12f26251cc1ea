"""The argument parser, and its errors as one line: the key, the value, and what is allowed."""

import difflib
import re
from inspect import isabstract
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator

# Keys whose value is a class, and the classes they accept.
CLASS_KEYS = {"model": L.LightningModule, "data": L.LightningDataModule, "kl.estimator": KLEstimator}


class OneLineParser(LightningArgumentParser):
    """Reports a parsing error as one line instead of a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise what the command line prints.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(one_line(message, self._known_keys())) from ex

    def _known_keys(self) -> list[str]:
        return [option.lstrip("-") for option in self._option_string_actions]


def known_classes(key: str) -> list[str]:
    """Names of this package's final classes that the key accepts."""
    found: set[str] = set()
    todo: list[type] = [CLASS_KEYS[key]]
    while todo:
        subclasses: list[type] = todo.pop().__subclasses__()
        todo += subclasses
        found |= {
            c.__name__ for c in subclasses if c.__module__.startswith("lit_klrb.") and not isabstract(c)
        }
    return sorted(found)


def one_line(message: str, known_keys: list[str]) -> str:
    """Jsonargparse's page of tried alternatives as the one line a user needs.

    Args:
        message: The parser's message.
        known_keys: Keys to suggest where one is misspelt.
    """
    if match := re.match(r"unrecognized arguments: --(\S+?)(?:[= ](.*))?$", message, re.DOTALL):
        return f"unknown key {match[1]}{_close(match[1], known_keys)}"
    keys = re.findall(r'Parser key "([^"]+)"', message)
    key = ".".join(keys).replace(".init_args.init_args", ".init_args")
    given = re.search(r"Given value: (.*)", message)
    value = given[1].strip() if given else ""
    if match := re.search(r"(?:Option|Key|Group) '([^']+)' is not (?:accepted|expected)", message):
        return f"{_joined(key, 'init_args', match[1])} is no key of {_class_in(message)}"
    if "dot import path" in message and key in CLASS_KEYS:
        known = known_classes(key)
        return f"{key}: {value} is no known class{_close(value, known)}; known: {', '.join(known)}"
    if literals := re.search(r"Literal\[(.*?)\]", message):
        optional = ", null" if "NoneType" in message else ""
        return f"{key}: {value!r} is not one of {literals[1]}{optional}"
    if match := re.search(r"Expected an? <class '(\w+)'>\. Got value: (.*)", message):
        return f"{key}: {match[2]!r} is not of type {match[1]}"
    return " ".join(message.split())


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _class_in(message: str) -> str:
    found = re.search(r"class_path '(?:[\w.]*\.)?(\w+)'", message)
    return found[1] if found else "this configuration"


def _close(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
