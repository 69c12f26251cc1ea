"""The argument parser, whose errors are one line with the key, the value and what is allowed."""

import functools
import inspect
import operator
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lit_klrb.cli.suggestions import suggestion
from lit_klrb.config_files import check_config_file
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator
from lit_klrb.studies.study import Study

# Keys whose value is a class, and the base classes they accept.
CLASS_KEYS: dict[str, type] = {
    "model": L.LightningModule,
    "data": L.LightningDataModule,
    "kl.estimator": KLEstimator,
    "study": Study,
}
# Keys whose values are classes, of Lightning or the user's own.
PLUGINS = {"trainer.callbacks": Callback, "trainer.logger": Logger}
# The keys of a sweep's plan, which is not a configuration of a run.
PLAN_KEYS = {"stages", "grid", "primary"}
# jsonargparse says what is wrong in sentences alone. It nests them from the outside in, each after its key.
# Where a version has other words, its own sentence is shown.
_KEY = re.compile(r'Parser key "([^"]+)":?')
_LINKED = re.compile(r"argument .*\((\S+)\) --> (\S+): ")
_UNKNOWN = re.compile(r"(?:Option|Key|Group) '([^']+)' is not (?:accepted|expected)")
_QUOTED = re.compile(r'"([^".]+)')
_UNRECOGNISED = re.compile(r"unrecognized arguments: (?P<word>\S+)|Subcommand '[^']*'[^']*'(?P<key>[^']+)'")
_REQUIRED = "the following arguments are required: "
# A value that is not a class, or not one that the key accepts, and the reason where that helps.
_NO_CLASS = re.compile(
    r"Expected a dot import path|not correspond to a subclass|Not a valid subclass of \w+\."
    r"|(?P<reason>is abstract|No module named .+|module '[\w.]+' has no attribute .+)"
)
_CLASS = re.compile(r"(?:path string: |Import path |class, but |class_path ')(.+?)['\s]")


# Enumerations among the defaults of Lightning's callbacks, which PyYAML refuses
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))


class OneLineParser(LightningArgumentParser):
    """An argument parser that raises errors instead of printing them with the usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise the unchanged message, which an outer parser may catch and include in its own.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(message) from ex

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Add the arguments of a class; integers given for int | float stay integers.

        For typing, Union[int, float] equals Union[float, int], and it may give one for the other. Whether `1`
        means one batch or, as 1.0, all of them must not depend on that.
        """
        added = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            kinds = list(getattr(getattr(action, "_typehint", None), "__args__", ()))
            if int in kinds and float in kinds:
                kinds.sort(key=lambda kind: kind is not int)
                action._typehint = functools.reduce(operator.or_, kinds)  # type: ignore[attr-defined]
        return added

    def parse_path(self, path: Any, **kwargs: Any) -> Any:
        """Check and parse a configuration file; errors that name no key name the file.

        Raises:
            ConfigurationError: If it is not a configuration file, or a value in it is not allowed.
        """
        check_config_file(Path(path))
        content = yaml.safe_load(Path(path).read_text("utf-8-sig"))
        given = content if isinstance(content, dict) else {}
        self._check_sections(path, given)
        try:
            return super().parse_path(path, **kwargs)
        except ConfigurationError as error:
            reason, prefix = str(error), "Problems parsing config: "
            if given.keys() >= PLAN_KEYS:
                reason = f"is the plan of a sweep; run it with: python -m analysis sweep --config {path}"
                raise ConfigurationError(f"{path} {reason}") from None
            if reason.startswith("Unexpected config"):
                sections = f"{', '.join(map(str, given))}: " if isinstance(content, dict) else ""
                reason = f"{sections}a mapping of keys to values is expected"
            elif not reason.startswith((prefix, "Key must be")):
                raise
            raise ConfigurationError(f"{path}: {reason.removeprefix(prefix)}") from None

    def _check_sections(self, path: Any, content: dict[str, Any]) -> None:
        """Refuse what jsonargparse passes over: a section that is no mapping, and a file within a file."""
        if "config" in content:
            raise ConfigurationError(f"{path}: config: no file names another; give each with --config")
        # Names of classes, and paths of files, are text; classes are checked with those that are known
        sections = {key.partition(".")[0] for key in self.known_keys() if "." in key} - CLASS_KEYS.keys()
        for section in sorted(sections & content.keys()):
            if not isinstance(content[section], (dict, str)):
                raise ConfigurationError(f"{path}: {section}: a mapping of its options is expected")

    def known_keys(self) -> list[str]:
        """The dotted names of all options."""
        return [option.lstrip("-") for option in self._option_string_actions]


def known_classes(key: str) -> dict[str, type]:
    """The classes of this package that a key accepts, by name."""
    found = {
        c.__name__: c
        for c in _subclasses(CLASS_KEYS[key])
        if c.__module__.startswith("lit_klrb.") and not inspect.isabstract(c)
    }
    return dict(sorted(found.items()))


def _subclasses(base: type) -> Iterator[type]:
    """All direct and indirect subclasses of a class."""
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def one_line(message: str, known_keys: list[str]) -> str:
    """Reduce jsonargparse's message, which lists all alternatives it tried, to one line.

    Args:
        message: The parser's message.
        known_keys: Keys to suggest for a misspelt one.
    """
    # argparse's own errors come first, as they are not nested in others
    if message.startswith(_REQUIRED):
        return _missing(message.removeprefix(_REQUIRED).split(", "))
    # A linked key, such as a module's seed, is computed from another; the user must set the other
    if match := _LINKED.match(message):
        return f"{match[2]}: follows from {match[1]}, which is the key to set"
    # A section with a scalar or a path for its value: only its first name is of use, as the rest was not read
    unread = " not found in namespace" in message or "Unable to load config" in message
    if unread and (match := _QUOTED.search(message)):
        return f"{match[1]}: a mapping of its options is expected"
    if match := _UNRECOGNISED.match(message):
        # A positional argument is nearly always a configuration file without --config
        if match["word"] and not match["word"].startswith("-"):
            return f"{match['word']}: an option is expected; a configuration is named by --config"
        return _unknown((match["key"] or match["word"]).lstrip("-").partition("=")[0], known_keys)
    # jsonargparse also tries the value as the path of a file, whose failure hides the real reason
    tried = _after("Expected a path but ", message).partition(" either ")[0]
    message = "\n".join(line for line in message.splitlines() if "Expected a path but" not in line)
    _, *pairs = _KEY.split(message)
    keys, problem = pairs[::2] or [""], pairs[-1] if pairs else message
    key, *inner = keys
    full_key = _joined(key, "init_args" if inner and key in CLASS_KEYS else "", *inner)
    unknown = _UNKNOWN.search(message)
    if unknown and not inner:
        name = unknown[1].removeprefix("init_args.")
        place = "" if key.endswith(f".{name}") else _joined(key, "init_args" if key in CLASS_KEYS else "")
        return f"unknown key {_joined(place, name)}{suggestion(name, parameters_of(key) or known_keys)}"
    return (
        _incomplete(full_key, problem)
        or _no_class(full_key, problem)
        or _wrong_type(full_key, problem)
        or (f"{full_key}: {tried}: {' '.join(problem.split()).lstrip('- ')}" if tried else "")
        or " ".join(message.split())
    )


def _unknown(key: str, known_keys: list[str]) -> str:
    """The message for an unknown key, or for its section if that is unknown."""
    section, sections = key.partition(".")[0], sorted({known.partition(".")[0] for known in known_keys})
    if section not in sections:
        inner = [f"{place}.init_args.{name}" for place in CLASS_KEYS for name in parameters_of(place)]
        return f"unknown key {section}{suggestion(section, [*sections, *known_keys, *inner])}"
    return f"unknown key {key}{suggestion(key, known_keys)}"


def _missing(keys: list[str]) -> str:
    """The message for missing required keys."""
    known = [key.partition(".")[2] for key in keys if key.partition(".")[2] in CLASS_KEYS]
    if len(known) != 1:
        return "what to run is missing: name a configuration, for example --config configs/demo/sft.yaml"
    return f"{known[0]}: a class is missing; known: {', '.join(known_classes(known[0]))}"


def _incomplete(key: str, problem: str) -> str | None:
    """The message for a class whose constructor lacks an argument; None for other errors."""
    missing, named = _after(_REQUIRED, problem), _after("class_path='", problem).partition("'")[0]
    if not (missing and named):
        return None
    names = missing.split(", ")
    options = " ".join(f"--{key}.{name} VALUE" for name in names)
    return f"{key}: {named.rpartition('.')[2]} needs {' and '.join(names)}: add {options}"


def _no_class(key: str, problem: str) -> str | None:
    """The message for a value that should be a class; None for other errors."""
    match = _NO_CLASS.search(problem)
    if match is None or (key not in CLASS_KEYS and "<class 'lightning" not in problem):
        return None
    named = _CLASS.search(f"{problem} ")
    given = _given(problem) or (named[1] if named else "")
    given = given.removeprefix("{'class_path': '").removesuffix("'}")
    known = list(known_classes(key)) if key in CLASS_KEYS else []
    alike = known or [kind.__name__ for kind in _subclasses(PLUGINS[key])] if key in PLUGINS else known
    listed = f"; known: {', '.join(known)}" if known else ""
    reason = f" ({match['reason']})" if match["reason"] else ""
    return f"{key}: unknown class {given}{reason}{suggestion(given, alike)}{listed}"


def _wrong_type(key: str, problem: str) -> str | None:
    """The message for a value of a wrong type; None for other errors."""
    if types := _after("Subtypes: [", problem).removesuffix("]"):
        names, value = _split(types), _given(problem)
    elif name := (_after("Expected a ", problem) or _after("Expected an ", problem)):
        names, value = [name.partition(". Got value:")[0]], _after("Got value: ", problem)
    else:
        return None
    if key in CLASS_KEYS:
        return f"{key}: {_shown(value)} is not the name of a class; known: {', '.join(known_classes(key))}"
    allowed = [plain_type(name) for name in names]
    if all(name.startswith("typing.Literal") or "NoneType" in name for name in names):
        return f"{key}: {_shown(value)} is not one of {', '.join(allowed)}"
    *others, last = allowed
    return f"{key}: {_shown(value)} is not of type {', '.join(others)}{' or ' if others else ''}{last}"


def plain_type(name: str) -> str:
    """The name of a Python type in the terms of configuration files.

    Example:
        >>> plain_type("<class 'int'>"), plain_type("typing.Literal['a']"), plain_type("dict[str, float]")
        ('int', "'a'", 'mapping')
    """
    if name.startswith("typing.Literal["):
        return name.removeprefix("typing.Literal[").removesuffix("]")
    if name.startswith("<class '"):
        plain = name.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
        return {"NoneType": "null", "dict": "mapping", "Iterable": "list"}.get(plain, plain)
    return "mapping" if "dict" in name.lower() else "list"


def parameters_of(key: str) -> list[str]:
    """All arguments of the classes that a key accepts, including those of base classes."""
    if key not in CLASS_KEYS:
        return []
    mros = [ancestor for known in known_classes(key).values() for ancestor in known.__mro__[:-1]]
    ours = [c for c in mros if c.__module__.startswith("lit_klrb.")]
    return sorted({name for c in ours for name in inspect.signature(c).parameters})


def located(error: ConfigurationError) -> str:
    """The message of an error, with the section of the configuration added to its key.

    Example:
        >>> located(ConfigurationError("must be positive, got 0", key="beta_of_nothing"))
        'beta_of_nothing: must be positive, got 0'
        >>> located(ConfigurationError("must be at least 1, got 0", key="max_steps"))
        'trainer.max_steps: must be at least 1, got 0'
    """
    for section in CLASS_KEYS:
        if error.key in parameters_of(section):
            return f"{section}.init_args.{error}"
    return f"trainer.{error}" if error.key in inspect.signature(L.Trainer).parameters else str(error)


def _split(types: str) -> list[str]:
    """Split a list of types as printed by Python at the commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", types)]


def _given(problem: str) -> str:
    """The value that none of several types accepts, or that of an option below a class; empty without one."""
    value = _after("Given value: ", problem) or _after("Got value: ", problem)
    return value.rpartition("val=")[2].strip("')") if value.startswith("NestedArg(") else value


def _after(mark: str, text: str) -> str:
    """The rest of the line after the first `mark`; empty without one."""
    return text.partition(mark)[2].partition("\n")[0].strip()


def _shown(value: str) -> str:
    """A value as written in YAML, with quotes around text."""
    value = " ".join(value.split())
    plain = value[:1] in ("[", "{") or value in ("None", "True", "False")
    return {"None": "null"}.get(value, value) if plain else repr(value)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
