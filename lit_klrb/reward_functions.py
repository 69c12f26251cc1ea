"""Rewards by Python functions of texts, or of prompts, completions and other columns of the data."""

import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, brief

KEY = "reward_path"
COMPLETIONS, PROMPTS = "completions", "prompts"
# Values by column name, one per text; among them the text's prompt and its completion.
Columns = Mapping[str, Sequence[Any]]
NO_COLUMNS: Columns = {}
# Characters of a value in messages.
SHOWN = 60


class FunctionReward:
    """A reward by any function from a list of texts to numbers, whose results are checked.

    Args:
        name: The function's name in error messages.
        function: Returns one number per text, as a sequence, an array, a tensor or a generator.

    Raises:
        ConfigurationError: If it is not a function; when called, if it does not return one finite number per
            text.
    """

    def __init__(self, name: str, function: Callable[[Sequence[str]], Iterable[float]]) -> None:
        if isinstance(function, type) or not callable(function):
            kind = "a class" if isinstance(function, type) else _described(function)
            raise ConfigurationError(f"{name} is {kind}; it must be a function of a list of texts", key=KEY)
        self.name, self.function = name, function

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """The function's scores, float32 [B]."""
        result = _called(self.name, "a list of texts", self.function, texts)
        return _checked(self.name, texts, result)


class CompletionReward:
    """A reward by a function of prompts, completions and other columns of the data, as in TRL.

    The function is called with keyword arguments, each a list with one entry per completion: `prompts` and
    `completions`, decoded without special tokens, and the columns of the prompts' rows. Prompts and
    completions of conversations are lists of messages. A function without `**kwargs` receives the arguments
    that it names.

    Args:
        name: The function's name in error messages.
        function: Returns one number per completion.

    Raises:
        ConfigurationError: When called, if a column that the function needs is missing, or it does not return
            one finite number per completion.

    Example:
        >>> def exact(completions, answer, **columns):
        ...     return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]
        >>> reward = CompletionReward("exact", exact)
        >>> reward(["2+2= 4", "2+3= 4"], {"completions": [" 4", " 4"], "answer": ["4", "5"]})
        tensor([1., 0.])
    """

    def __init__(self, name: str, function: Callable[..., Iterable[float]]) -> None:
        self.name, self.function = name, function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.needs = {
            parameter.name: parameter.default is parameter.empty
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """The function's scores, float32 [B]."""
        for name, needed in self.needs.items():
            if needed and name not in columns:
                others = ", ".join(column for column in columns if column not in (PROMPTS, COMPLETIONS))
                raise ConfigurationError(
                    f"{self.name} needs the column {name}; besides the texts, the prompts have "
                    f"{others or 'no columns'}",
                    key=KEY,
                )
        given = {name: values for name, values in columns.items() if self.takes_all or name in self.needs}
        result = _called(self.name, "keyword arguments", self.function, **given)
        return _checked(self.name, texts, result)


def function_reward(name: str, function: Any) -> FunctionReward | CompletionReward:
    """A reward by a function; one with a parameter `completions` is called as in TRL.

    Args:
        name: The function's name in error messages.
        function: See `FunctionReward` and `CompletionReward`.

    Raises:
        ConfigurationError: If it is not a function.
    """
    if not isinstance(function, type) and callable(function):
        try:
            if COMPLETIONS in inspect.signature(function).parameters:
                return CompletionReward(name, function)
        except (TypeError, ValueError):
            pass  # some functions written in C have no signature
    return FunctionReward(name, function)


def import_member(path: str, module: str, name: str, key: str | None = None) -> Any:
    """Import a user's function or class.

    Args:
        path: How the user names it, for the error message.
        module: Its module.
        name: Its name in the module; may be dotted.
        key: The argument that names it.

    Raises:
        ConfigurationError: If importing the module fails, or it has no such attribute.
    """
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # a user's module may raise anything
        kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
        raise ConfigurationError(f"cannot import {path}: {kind}{brief(error)}", key=key) from error


def _called(name: str, given: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # from within the function, where a traceback helps its author
        raise ConfigurationError(f"{name} cannot be called with {given} ({error})", key=KEY) from error


def _checked(name: str, texts: Sequence[str], result: Any) -> Tensor:
    scores = as_numbers(result)
    if scores is None or scores.shape != (len(texts),):
        raise ConfigurationError(
            f"{name} must return {len(texts)} numbers for {len(texts)} texts, got {_described(result)}",
            key=KEY,
        )
    return finite(name, texts, scores)


def as_numbers(values: Any) -> Tensor | None:
    """Convert real numbers in any container to a float32 tensor; None if that is not possible.

    Example:
        >>> as_numbers(n / 2 for n in range(3)), as_numbers("good"), as_numbers(["1.5"])
        (tensor([0.0000, 0.5000, 1.0000]), None, None)
    """
    if isinstance(values, (str, bytes, Mapping)):
        return None
    if isinstance(values, Iterator):
        values = list(values)
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if numbers.is_complex() else numbers.detach().float()


def _described(value: Any) -> str:
    """A short description of a value: the shape of a tensor, the length of a list, and a truncated repr."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return f"{len(value)} elements, {shown}" if isinstance(value, (list, tuple)) else shown


def finite(name: str, texts: Sequence[str], scores: Tensor) -> Tensor:
    """Return the scores after checking that all are finite.

    Raises:
        ConfigurationError: If one is not; names the first such text.
    """
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ConfigurationError(
            f"{name} gave {scores[wrong[0]].item()} for the text {texts[wrong[0]]!r}", key=KEY
        )
    return scores
