"""The argument parser, which remembers the type of every key for `Door`."""

import functools
import operator
from enum import Enum
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lit_klrb.cli.setting_types import parameters
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
