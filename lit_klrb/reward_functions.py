"""Rewards by Python functions of texts, or of prompts, completions and other columns of the data."""

import asyncio
import contextlib
import importlib
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, brief

KEY = "reward_path"
COMPLETIONS, PROMPTS = "completions", "prompts"
# What a function may ask for by name beside columns: token ids of the completions, the state of the training,
# and a function of a name and a number to be logged
IDS, STATE, LOG = "completion_ids", "trainer_state", "log_metric"
# Values by column name, one per text, among them the text's prompt and its completion; and `STATE` and `LOG`.
Columns = Mapping[str, Any]
NO_COLUMNS: Columns = {}
# Codes of HTTP that ask for patience: a time-out, too many requests.
BUSY = (408, 429)
# Characters of a value in messages.
SHOWN = 60


class LateColumns(Mapping[str, Any]):
    """Columns that are made when one is read, as most rewards read the texts alone.

    Args:
        make: Makes the columns.
    """

    def __init__(self, make: Callable[[], Columns]) -> None:
        self._made = cache(make)

    def __getitem__(self, name: str) -> Any:
        return self._made()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())


class TrainerState(NamedTuple):
    """What a reward may read of the training.

    Args:
        global_step: Optimizer steps that are done.
        max_steps: Those of the whole run.
    """

    global_step: int
    max_steps: int


class FunctionReward:
    """A reward by a function that returns one number per text, whose results are checked.

    It is called with the list of texts, unless it has a parameter `completions`. Then it is called as in TRL,
    with keyword arguments that are lists with one entry per completion: `prompts` and `completions`, decoded
    without special tokens, and the columns of the prompts' rows. Prompts and completions of conversations are
    lists of messages. A function without `**kwargs` receives the arguments that it names. If it names them,
    it is also given `completion_ids`, `trainer_state` (a `TrainerState`), and `log_metric`, a function of a
    name and a number, whose mean over the rollout is logged as `train/logged/NAME`. It may be a coroutine.
    None for a completion means that the reward has nothing to say about it: the score is then NaN, which
    `WeightedReward` leaves out.

    Args:
        name: The function's name in error messages.
        function: Returns a sequence, an array, a tensor or a generator.

    Raises:
        ConfigurationError: If it is not a function; when called, if a column that the function needs is
            missing, or it does not return one finite number per text.

    Example:
        >>> def exact(completions, answer, **columns):
        ...     return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]
        >>> reward = FunctionReward("exact", exact)
        >>> reward(["2+2= 4", "2+3= 4"], {"completions": [" 4", " 4"], "answer": ["4", "5"]})
        tensor([1., 0.])
    """

    def __init__(self, name: str, function: Callable[..., Iterable[float]]) -> None:
        if isinstance(function, type) or not callable(function):
            kind = "a class" if isinstance(function, type) else _described(function)
            raise ConfigurationError(f"{name} is {kind}; it must be a function of a list of texts", key=KEY)
        self.name, self.function = name, function
        self.parameters: Mapping[str, inspect.Parameter] = {}
        with contextlib.suppress(TypeError, ValueError):  # some functions written in C have no signature
            self.parameters = inspect.signature(function).parameters

    def __call__(self, texts: Sequence[str], columns: Columns = NO_COLUMNS) -> Tensor:
        """The function's scores, float32 [B]."""
        by_name = COMPLETIONS in self.parameters
        arguments = self._given(columns) if by_name else {}
        try:
            result: Any = self.function(**arguments) if by_name else self.function(texts)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
        except Exception as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from within the function, where a traceback helps its author
            called = f"cannot be called with {'keyword arguments' if by_name else 'a list of texts'}"
            raise ConfigurationError(f"{self.name} {called} ({error})", key=KEY) from error
        if isinstance(result, Iterator):
            result = list(result)
        silent = [index for index, score in enumerate(result) if score is None] if is_list(result) else []
        scores = as_numbers([math.nan if score is None else score for score in result] if silent else result)
        if scores is None or scores.shape != (len(texts),):
            must = f"{self.name} must return {len(texts)} numbers for {len(texts)} texts"
            raise ConfigurationError(f"{must}, got {_described(result)}", key=KEY)
        finite(self.name, texts, scores.index_fill(0, torch.tensor(silent, dtype=torch.long), 0))
        return scores

    def _given(self, columns: Columns) -> dict[str, Any]:
        """The arguments of a function of columns."""
        variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        named: dict[str, Any] = {n: p for n, p in self.parameters.items() if p.kind not in variable}
        for name, parameter in named.items():
            if parameter.default is parameter.empty and name not in columns:
                own = (PROMPTS, COMPLETIONS, IDS, STATE, LOG)
                others = ", ".join(column for column in columns if column not in own) or "no columns"
                problem = f"needs the column {name}; besides the texts, the prompts have {others}"
                raise ConfigurationError(f"{self.name} {problem}", key=KEY)
        if any(p.kind is p.VAR_KEYWORD for p in self.parameters.values()):
            named |= dict.fromkeys(columns.keys() - {IDS, STATE, LOG})
        return {name: column for name, column in columns.items() if name in named}


async def _awaited(result: Any) -> Any:
    return await result


def is_unavailable(error: BaseException) -> bool:
    """Whether an error says that a server cannot be reached, takes too long or is too busy.

    Libraries have classes of their own for that, which are known by their names.

    Example:
        >>> is_unavailable(TimeoutError()), is_unavailable(ConnectionResetError()), is_unavailable(KeyError())
        (True, True, False)
    """
    code = getattr(error, "code", None)
    if isinstance(code, int):  # of HTTP
        return code in BUSY or code >= 500
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    return any(name in kinds for name in ("Timeout", "Connect", "URLError", "RateLimit", "Unavailable"))


def import_member(path: str, module: str, name: str, key: str | None = None) -> Any:
    """Import a user's function or class.

    Raises:
        ConfigurationError: If importing the module fails, or it has no such attribute.
    """
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
        raise ConfigurationError(f"cannot import {path}: {kind}{brief(error)}", key=key) from error


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
    return f"{len(value)} elements, {shown}" if is_list(value) else shown


def is_list(value: Any) -> bool:
    """Whether a value is a list or a tuple."""
    return isinstance(value, (list, tuple))


def finite(name: str, texts: Sequence[str], scores: Tensor) -> Tensor:
    """Return the scores after checking that all are finite."""
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ConfigurationError(
            f"{name} gave {scores[wrong[0]].item()} for the text {texts[wrong[0]]!r}", key=KEY
        )
    return scores
