"""Statistics whose last digits are moved, as by another processor."""

import dataclasses
import functools
import inspect
import sys
from contextlib import contextmanager

import numpy as np

from analysis.stats.pairs import Pairs

# Formats texts.
_KEPT = {"analysis.stats.text"}
# Attributes that are copied from the plan.
_PLANNED = {"beta", "alpha", "level", "margin"}


def moved(value, shift):
    """The value with each number in it that is a float multiplied by 1 + `shift`(shape)."""
    if isinstance(value, float | np.floating):
        return type(value)(value * (1 + shift(())))
    if isinstance(value, np.ndarray):
        return value * (1 + shift(value.shape)) if value.dtype.kind == "f" else value
    if type(value) in (tuple, list):
        return type(value)(moved(one, shift) for one in value)
    if type(value) is dict:
        return {key: moved(one, shift) for key, one in value.items()}
    if isinstance(value, Pairs):
        return value  # outcomes of runs
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = {name: moved(getattr(value, name), shift) for name in names if name not in _PLANNED}
        return dataclasses.replace(value, **changes)
    return value


@contextmanager
def moved_statistics(size, monkeypatch):
    """Move all that functions of `analysis.stats` return, each number by up to `size` relative to it."""
    rng = np.random.default_rng(0)

    def wrap(function):
        @functools.wraps(function)
        def wrapped(*arguments, **options):
            return moved(function(*arguments, **options), lambda shape: size * rng.uniform(-1, 1, shape))

        return wrapped

    modules = [
        module for name, module in sys.modules.items() if name.startswith(("analysis.", "replication."))
    ]
    functions = {one for module in modules for one in vars(module).values() if inspect.isfunction(one)}
    wrapped = {
        one: wrap(one)
        for one in functions
        if one.__module__.startswith("analysis.stats")
        and not {one.__module__, f"{one.__module__}.{one.__name__}"} & _KEPT
    }
    with monkeypatch.context() as patch:
        for module in modules:
            for name, function in list(vars(module).items()):
                if inspect.isfunction(function) and function in wrapped:
                    patch.setattr(module, name, wrapped[function])
        yield len(wrapped)
