"""Types of settings: the arguments of classes, and whether a value can be of a type."""

import ast
import contextlib
import importlib
import inspect
import sys
import textwrap
import types
from abc import ABC
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from lightning_utilities.core.imports import RequirementCache

from lit_klrb.cli.suggestions import suggestion
from lit_klrb.errors import ConfigurationError

# Modules with types that are no classes of the user's choice
OTHERS = ("builtins", "collections.abc", "typing", "os", "torch", "numpy")
WORDS = {"true", "false", "yes", "no", "on", "off", "null"}
NAMES: dict[Any, str] = {type(None): "null", dict: "mapping", list: "list"}
PLAIN = (bool, int, float, str, type(None), timedelta, Path, complex, bytes)


class Parameters(NamedTuple):
    """The arguments of a class."""

    hints: dict[str, Any]  # their types by name; Any where there is none
    required: list[str]  # those without a default
    are_all: bool  # false if it also takes others


def parameters(kind: type) -> Parameters:
    """The arguments of a class, and those that its `**kwargs` hand on to its base classes.

    What an `__init__` gives its base class by name, such as `super().__init__(root_dir=save_dir, **kwargs)`,
    nobody else can give.
    """
    accepted: dict[str, inspect.Parameter] = {}
    passed: set[str] = set()
    hints: dict[str, Any] = {}
    are_all = False
    for base in kind.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        arguments = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        known: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # names that only a type checker imports
            known = get_type_hints(base.__init__)  # type: ignore[misc]
        hands_on = any(p.kind is p.VAR_KEYWORD for p in arguments)
        for p in arguments:
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in {*accepted, *passed}:
                accepted[p.name], hints[p.name] = p, known.get(p.name, Any)
        if not hands_on:
            are_all = True
            break
        passed |= _passed(base)
    required = [name for name, p in accepted.items() if p.default is p.empty]
    return Parameters(hints, required, are_all)


def _passed(kind: type) -> set[str]:
    """The names of the arguments that the `__init__` of a class gives its base class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    except (OSError, TypeError):  # it has no source
        return set()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    to_base = (call for call in calls if ast.unparse(call.func) == "super().__init__")
    return {keyword.arg for call in to_base for keyword in call.keywords if keyword.arg}


def alternatives(hint: Any) -> Iterator[Any]:
    """The types of a union, or the type itself."""
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from alternatives(part)
    else:
        yield hint


def classes_in(hint: Any) -> tuple[type, ...]:
    """The classes of which a value of this type is made, such as those of Lightning's callbacks."""
    classes: list[type] = []
    for part in alternatives(hint):
        if get_origin(part) not in (None, Literal, dict, Mapping):
            classes += [kind for inner in get_args(part) for kind in classes_in(inner)]
        elif isinstance(part, type) and not (part in PLAIN or is_typeddict(part)):
            classes += [part] * (part.__module__ not in OTHERS)
    return tuple(dict.fromkeys(classes))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value can be of a type; True in doubt. Text can be a number as YAML writes it.

    Example:
        >>> fits("much", float), fits("1e-3", float), fits("1.5", int | None), fits([1], str)
        (False, True, False, False)
    """
    return any(_fits(value, part) for part in alternatives(hint))


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint) or str(value) in map(str, get_args(hint))
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool) or (isinstance(value, str) and value.lower() in WORDS)
    if hint in (int, float):
        return _is_number(value, hint)
    if hint is str:
        return value is not None and not isinstance(value, (list, Mapping))
    container = origin or hint
    if container in (dict, Mapping) or is_typeddict(hint):
        inner = get_args(hint)[1:] or (Any,)
        return isinstance(value, Mapping) and all(fits(item, inner[0]) for item in value.values())
    if isinstance(container, type) and container.__module__ in ("builtins", "collections.abc"):
        inner = get_args(hint)[:1] or (Any,)
        is_list = isinstance(value, list) and _length(hint) in (None, len(value))
        return container is object or (is_list and all(fits(item, inner[0]) for item in value))
    if isinstance(hint, type) and classes_in(hint):
        return isinstance(value, (str, Mapping))
    return True


def _length(hint: Any) -> int | None:
    """The number of elements of a tuple of fixed length; None for other types."""
    elements = get_args(hint)
    return len(elements) if get_origin(hint) is tuple and Ellipsis not in elements else None


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            kind(value.replace(".nan", "nan").replace(".inf", "inf") if kind is float else value)
            return True
        return False
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def wrong_type(key: str, value: Any, hint: Any) -> ConfigurationError:
    """The error for a value that is not of the type of its key."""
    kinds = list(dict.fromkeys(_named(part) for part in alternatives(hint)))
    shown = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    if all(get_origin(part) is Literal or part is type(None) for part in alternatives(hint)):
        return ConfigurationError(f"{key}: {shown} is not one of {', '.join(kinds)}")
    *others, last = kinds
    either = f"{', '.join(others)}{' or ' if others else ''}{last}"
    return ConfigurationError(f"{key}: {shown} is not of type {either}")


def _named(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return ", ".join(repr(value) for value in get_args(hint))
    if origin is not None or is_typeddict(hint):
        kind = "mapping" if origin in (dict, Mapping) or is_typeddict(hint) else "list"
        return kind if (length := _length(hint)) is None else f"{kind} of {length}"
    return NAMES.get(hint) or str(getattr(hint, "__name__", hint))


def class_of(key: str, path: str, bases: tuple[type, ...]) -> type | None:
    """The class that a setting names; None for a function that makes the object."""
    known = {kind.__name__: kind for base in bases for kind in subclasses(base)}
    value, reason = named(path, known)
    if isinstance(value, types.FunctionType):
        return None
    if isinstance(value, type) and issubclass(value, bases):
        if not is_abstract(value):
            _check_packages(key, value)
            return value
        reason = "is abstract"
    concrete = [(n, k) for n, k in sorted(known.items()) if not is_abstract(k)]
    packaged = [n for n, k in concrete if k.__module__.startswith("lit_klrb.")]
    listed = f"; known: {', '.join(packaged)}" if packaged else ""
    why = f" ({reason})" if reason else ""
    meant = suggestion(path, packaged or list(known))
    raise ConfigurationError(f"{key}: unknown class {path}{why}{meant}{listed}")


def _check_packages(key: str, kind: type) -> None:
    """Check that one of the packages is installed that Lightning says a class needs."""
    module = vars(sys.modules[kind.__module__]) if kind.__module__.startswith("lightning.") else {}
    needed = [value for value in module.values() if isinstance(value, RequirementCache)]
    if needed and not any(needed):
        remedy = f"pip install '{needed[0].requirement}'"
        raise ConfigurationError(f"{key}: {kind.__name__} needs a package: {remedy}")


def is_abstract(kind: type) -> bool:
    """Whether a class is for subclasses only: it lacks a method, or has ABC itself as a base."""
    return inspect.isabstract(kind) or ABC in kind.__bases__


def named(path: str, known: Mapping[str, type]) -> tuple[Any, str]:
    """The object with an import path, or the known class of a name; None with the reason if there is none."""
    module, _, name = path.rpartition(".")
    if not module:
        return known.get(name), ""
    try:
        return getattr(importlib.import_module(module), name), ""
    except (ImportError, AttributeError, ValueError) as error:
        return None, str(error)
    except SystemExit as end:  # it would end the command as if it were done
        return None, f"its module calls sys.exit({end.code})"


def subclasses(base: type) -> Iterator[type]:
    """A class, and all its direct and indirect subclasses."""
    yield base
    derived: list[type] = type.__subclasses__(base)
    for kind in derived:
        yield from subclasses(kind)
