"""The argument parser, and checks of all settings against their types before a library's parser sees them."""

import functools
import operator
from collections.abc import Sequence
from enum import Enum
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lit_klrb.cli.command_line import settings_of
from lit_klrb.cli.setting_types import alternatives, class_of, classes_in, fits, parameters, wrong_type
from lit_klrb.cli.suggestions import suggestion
from lit_klrb.errors import ConfigurationError

# Enumerations among the defaults of Lightning's callbacks, which PyYAML refuses
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))


class OneLineParser(LightningArgumentParser):
    """An argument parser that raises errors instead of printing them with the usage.

    `types` has the type of each key, `links` the key from which another follows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.types: dict[str, Any] = {}
        self.links: dict[str, str] = {}
        super().__init__(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise the message, as one line."""
        raise ConfigurationError(" ".join(message.split())) from ex

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an option, and remember its type."""
        if isinstance(self, OneLineParser):  # jsonargparse gives this method to groups of options, too
            self.types |= {name.lstrip("-"): kwargs.get("type", Any) for name in args}
        return super().add_argument(*args, **kwargs)

    def add_class_arguments(self, theclass: Any, nested_key: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Add the arguments of a class; integers given for int | float stay integers.

        For typing, Union[int, float] equals Union[float, int], and it may give one for the other. Whether `1`
        means one batch or, as 1.0, all of them must not depend on that.
        """
        added = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        self._remember(added, parameters(theclass).hints)
        for action in self._actions:
            kinds = list(getattr(getattr(action, "_typehint", None), "__args__", ()))
            if int in kinds and float in kinds:
                kinds.sort(key=lambda kind: kind is not int)
                action._typehint = functools.reduce(operator.or_, kinds)  # type: ignore[attr-defined]
        return added

    def add_method_arguments(self, theclass: Any, themethod: str, *args: Any, **kwargs: Any) -> Any:
        """Add the arguments of a method."""
        added = super().add_method_arguments(theclass, themethod, *args, **kwargs)
        self._remember(added, {})
        return added

    def add_subclass_arguments(self, baseclass: Any, nested_key: str, *args: Any, **kwargs: Any) -> Any:
        """Add a class of the user's choice."""
        self.types[nested_key] = baseclass
        return super().add_subclass_arguments(baseclass, nested_key, *args, **kwargs)

    def link_arguments(self, source: Any, target: str, *args: Any, **kwargs: Any) -> Any:
        """Let one key follow from another."""
        self.links[target.replace(".init_args.", ".")] = str(source)
        return super().link_arguments(source, target, *args, **kwargs)

    def _remember(self, keys: list[str], hints: dict[str, Any]) -> None:
        self.types |= {key: hints.get(key.rpartition(".")[2], Any) for key in keys}


MISSING = "what to run is missing: name a configuration, for example --config configs/demo/sft.yaml"
# Parts of a setting that is a class which are not arguments of it
PARTS = ("class_path", "init_args", "dict_kwargs", "help")


class SettingsChecker:
    """Checks what a command line sets: unknown keys, values of other types, unknown classes.

    `classes` has those of keys that have one by default.
    """

    def __init__(self, parser: OneLineParser, classes: dict[str, type]) -> None:
        self.parser, self.types = parser, parser.types
        self.classes: dict[str, type | None] = dict(classes)
        self.chosen: set[str] = set()

    def check(self, words: Sequence[str], required: Sequence[str]) -> None:
        """Check a command line; without required keys it may be a template that is not complete."""
        for key, value in settings_of(words):
            self._take(key.split("."), value)
        missing = [key for key in required if key not in self.classes]
        if len(missing) > 1 or (missing and len(required) == 1):
            raise ConfigurationError(MISSING)
        for key in missing:
            class_of(key, "", classes_in(self.types[key]))
        for key, kind in self.classes.items():
            if required and kind is not None:
                self._check_complete(key, kind)

    def _check_complete(self, key: str, kind: type) -> None:
        linked = {target.rpartition(".")[2] for target in self.parser.links if target.startswith(f"{key}.")}
        names = [n for n in parameters(kind).required if f"{key}.{n}" not in self.chosen and n not in linked]
        if names:
            options = " ".join(f"--{key}.{name} VALUE" for name in names)
            raise ConfigurationError(f"{key}: {kind.__name__} needs {' and '.join(names)}: add {options}")

    def _take(self, parts: list[str], value: Any) -> None:
        """Check one setting, of which `parts` are the parts of its key."""
        key = ".".join(parts)
        self._check_not_linked(key)
        for count in range(len(parts), 0, -1):
            if (known := ".".join(parts[:count])) in self.types:
                self._value(known, parts[count:], self.types[known], value)
                return
        sections = {known.partition(".")[0] for known in self.types}
        if parts[0] in sections and len(parts) == 1:
            if not isinstance(value, dict):
                raise ConfigurationError(f"{key}: a mapping of its options is expected")
            for name, inner in value.items():
                self._take([key, name], inner)
            return
        raise self._unknown(key if parts[0] in sections else parts[0])

    def _unknown(self, key: str) -> ConfigurationError:
        inner = [
            f"{key_of_class}.init_args.{name}"
            for key_of_class, kind in self.classes.items()
            if kind is not None
            for name in parameters(kind).hints
        ]
        sections = sorted({known.partition(".")[0] for known in self.types})
        return ConfigurationError(f"unknown key {key}{suggestion(key, [*sections, *self.types, *inner])}")

    def _value(self, key: str, rest: list[str], hint: Any, value: Any) -> None:
        """Check a value, or with `rest` a part of it, against the type of its key."""
        bases = classes_in(hint)
        if rest:
            if bases:
                self._part(key, bases, rest, value)
            return
        if isinstance(value, str) and "${" in value:
            return  # refers to another key
        if not fits(value, hint):
            raise wrong_type(key, value, hint)
        if bases and not (isinstance(value, str) and any(fits(value, kind) for kind in _plain(hint))):
            self._class(key, bases, value)

    def _class(self, key: str, bases: tuple[type, ...], value: Any) -> None:
        """Check the class or the classes that are a value."""
        if isinstance(value, list):
            for item in value:
                self._class(key, bases, item)
        elif isinstance(value, dict):
            for name in sorted(value, key=lambda name: name != "class_path"):
                self._part(key, bases, [name], value[name])
        elif isinstance(value, str):
            self.classes[key] = class_of(key, value, bases)

    def _part(self, key: str, bases: tuple[type, ...], rest: list[str], value: Any) -> None:
        """Check the path or an argument of a class."""
        name, *rest = rest
        if name == "init_args" and rest:
            name, *rest = rest
        elif name == "class_path":
            self._class(key, bases, value if isinstance(value, str) else str(value))
            return
        elif name == "init_args":
            if not isinstance(value, dict):
                raise ConfigurationError(f"{key}.init_args: a mapping of its options is expected")
            for inner in value:
                self._part(key, bases, ["init_args", inner], value[inner])
            return
        kind = self.classes.get(key)
        if name in PARTS or kind is None:
            return
        allowed = parameters(kind)
        if name in allowed.hints:
            self.chosen.add(f"{key}.{name}")
            self._check_not_linked(f"{key}.init_args.{name}")
            self._value(f"{key}.init_args.{name}", rest, allowed.hints[name], value)
        elif allowed.are_all:
            raise ConfigurationError(
                f"unknown key {key}.init_args.{name}{suggestion(name, list(allowed.hints))}"
            )

    def _check_not_linked(self, key: str) -> None:
        if (source := self.parser.links.get(key.replace(".init_args.", "."))) is not None:
            raise ConfigurationError(f"{key}: follows from {source}, which is the key to set")


def _plain(hint: Any) -> list[Any]:
    """The types of a union that are no classes, such as str beside Strategy."""
    return [part for part in alternatives(hint) if not classes_in(part)]
