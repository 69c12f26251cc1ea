"""Checks of configuration files before they are parsed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from lit_klrb.errors import ConfigurationError, concerning, refusing

# Explicit types of values, such as !!str.
PLAIN_TAGS = {"!", "str", "int", "float", "bool", "null", "seq", "map", "timestamp"}


def check_config_file(path: Path) -> None:
    """Check that a file has the structure and the encoding of a configuration, and no key twice."""
    text = _text(path)
    with concerning(path):
        try:
            _check_keys(text)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"is not YAML: {_yaml_reason(error)}") from None


def _text(path: Path) -> str:
    """The text of a configuration file. Reading a pipe or a device might never end, so neither is read."""
    with refusing(f"{path} cannot be read", OSError):  # such as a name that is too long
        exists = path.exists()
    if not exists:
        raise ConfigurationError(f"{path} does not exist; the path of a configuration is expected")
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file; the path of a configuration is expected")
    with refusing(f"{path} cannot be read", OSError), path.open("rb") as file:
        try:
            content = file.read()
        except OSError as error:
            error.filename = str(path)  # which reading does not name
            raise
    with refusing(f"{path} is not encoded in UTF-8", UnicodeDecodeError):
        return content.decode("utf-8")


@dataclass
class _Mapping:
    """A mapping or a sequence that is being read: the keys so far, None for a sequence."""

    keys: set[str] | None
    is_key_next: bool = True

    def check_key(self, event: yaml.Event) -> None:
        """Check that the next node of a mapping is not a key that it has; `<<` merges several."""
        if self.keys is None or not isinstance(event, yaml.NodeEvent):
            return
        if self.is_key_next and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
            if event.value in self.keys:
                raise ConfigurationError(f"has the key {event.value} twice")
            self.keys.add(event.value)
        self.is_key_next = not self.is_key_next


def _check_keys(text: str) -> None:
    """Check that no mapping has a key twice: PyYAML would take the last one."""
    parents = [_Mapping(None)]
    for event in _events(text):
        parents[-1].check_key(event)
        if isinstance(event, yaml.CollectionStartEvent):
            parents.append(_Mapping(set() if isinstance(event, yaml.MappingStartEvent) else None))
        elif isinstance(event, yaml.CollectionEndEvent):
            parents.pop()


def _events(text: str) -> Iterator[yaml.Event]:
    """The events of one document."""
    documents = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise ConfigurationError("has more than one document: a line of --- begins another")
        tag = getattr(event, "tag", None)
        if tag is not None and tag.removeprefix("tag:yaml.org,2002:") not in PLAIN_TAGS:
            raise ConfigurationError(f"has a value of the type {tag}; plain values only are read")
        yield event


def _yaml_reason(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML file, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{problem or ' '.join(str(error).split())}"
