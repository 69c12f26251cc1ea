"""The argument parser, and its errors as one line: the key, the value, and what is allowed."""

import difflib
import inspect
import re
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator

# Keys whose value is a class, and what the classes they accept descend from.
CLASS_KEYS = {"model": L.LightningModule, "data": L.LightningDataModule, "kl.estimator": KLEstimator}


class OneLineParser(LightningArgumentParser):
    """Raises its errors, instead of printing them below a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise the message as it is: an outer parser may catch it, and quote it in its own.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(message) from ex

    def known_keys(self) -> list[str]:
        """Every option by its dotted name."""
        return [option.lstrip("-") for option in self._option_string_actions]


def known_classes(key: str) -> dict[str, type]:
    """This package's classes that the key accepts, by name."""
    found: dict[str, type] = {}
    todo: list[type] = [CLASS_KEYS[key]]
    while todo:
        subclasses: list[type] = todo.pop().__subclasses__()
        todo += subclasses
        found |= {
            c.__name__: c
            for c in subclasses
            if c.__module__.startswith("lit_klrb.") and not inspect.isabstract(c)
        }
    return dict(sorted(found.items()))


def one_line(message: str, known_keys: list[str]) -> str:
    """Jsonargparse's page of tried alternatives as the one line a user needs.

    Args:
        message: The parser's message.
        known_keys: Keys to suggest where one is misspelt.
    """
    if message.startswith("the following arguments are required"):
        return "what to run is missing: name a configuration, for example --config configs/demo/sft.yaml"
    if match := re.match(r"unrecognized arguments: --(\S+?)(?:[= ].*)?$", message, re.DOTALL):
        return f"unknown key {match[1]}{_close(match[1], known_keys)}"
    key, *inner = re.findall(r'Parser key "([^"]+)"', message) or [""]
    full_key = _joined(key, "init_args" if inner and key in CLASS_KEYS else "", *inner)
    if match := re.search(r"(?:Option|Key|Group) '([^']+)' is not (?:accepted|expected)", message):
        return f"unknown key {_joined(key, 'init_args', match[1])}{_close(match[1], parameters_of(key))}"
    if key in CLASS_KEYS and (match := re.search(r"Expected a dot import path string: (\S+)", message)):
        known = list(known_classes(key))
        return f"{key}: {match[1]} is no known class{_close(match[1], known)}; known: {', '.join(known)}"
    if match := re.search(r"Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)", message):
        return f"{full_key}: {match[2].strip()!r} is not one of {match[1]}"
    optional = r"Subtypes: \[typing\.Literal\[(.*?)\], <class 'NoneType'>\].*?Given value: (.*?)$"
    if match := re.search(optional, message, re.DOTALL | re.MULTILINE):
        return f"{full_key}: {match[2].strip()!r} is not one of {match[1]}, null"
    if match := re.search(r"Expected an? <class '(\w+)'>\. Got value: (.*)", message):
        return f"{full_key}: {match[2].strip()!r} is not of type {match[1]}"
    return " ".join(message.split())


def parameters_of(key: str) -> list[str]:
    """Every argument of the classes that the key accepts, those passed on to a base class included."""
    if key not in CLASS_KEYS:
        return []
    mros = [ancestor for known in known_classes(key).values() for ancestor in known.__mro__[:-1]]
    ours = [c for c in mros if c.__module__.startswith("lit_klrb.")]
    return sorted({name for c in ours for name in inspect.signature(c).parameters})


def located(error: ConfigurationError) -> str:
    """The error's line, its key by its place in a configuration file.

    Example:
        >>> located(ConfigurationError("must be positive, got 0", key="beta_of_nothing"))
        'beta_of_nothing: must be positive, got 0'
    """
    for section in CLASS_KEYS:
        if error.key in parameters_of(section):
            return f"{section}.init_args.{error}"
    return str(error)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _close(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
