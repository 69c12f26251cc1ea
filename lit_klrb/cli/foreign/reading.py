"""YAML files, shell scripts and Python scripts as settings by key; nothing in them is run."""

import ast
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_klrb.config_files import check_config_file, config_text
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path

# Parents of a configuration that are read at most.
MAX_PARENTS = 10
# Characters of a word of a shell script whose variables are replaced, and of a variable's value.
MAX_WORD = 10_000


class Settings(NamedTuple):
    """What a file sets.

    Args:
        name: Name of the file, in lower case.
        values: Values by dotted key, without leading dashes or pluses.
        words: All words of a shell script; the names of a Python script.
        calls: Keyword arguments of the calls in a Python script, by the name of what is called.
        notes: What could not be read.
    """

    name: str
    values: dict[str, Any]
    words: frozenset[str] = frozenset()
    calls: Mapping[str, dict[str, Any]] = {}
    notes: tuple[str, ...] = ()

    def has(self, prefix: str) -> bool:
        """Whether a key starts with the prefix."""
        return any(key.startswith(prefix) for key in self.values)

    def number(self, key: str, default: float) -> float | str:
        """The number at a key, or the text of an expression that is not resolved here.

        Example:
            >>> Settings("x", {"a": "1e-3", "b": "${coef}"}).number("a", 0.0)
            0.001
        """
        value = self.values.get(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return str(value)
        return number if math.isfinite(number) else str(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """The truth value at a key; a flag without a value is true."""
        return str(self.values.get(key, default)).lower() in ("true", "1", "yes")

    def text(self, key: str, default: str) -> str:
        """The text at a key."""
        return str(self.values.get(key, default))


def read_settings(path: str) -> Settings:
    """Read a configuration.

    Args:
        path: A .yaml, .yml, .py or .sh file; files with other names are read as shell scripts.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    file = local_path(path, "config")
    if file.suffix in (".yaml", ".yml"):
        values, notes = _read_yaml(file)
        return Settings(file.name.lower(), _flattened(values), notes=tuple(notes))
    text = config_text(file)
    read, kind = (_of_python, "Python") if file.suffix == ".py" else (_of_shell, "a shell script")
    kinds = ValueError, SyntaxError, RecursionError, MemoryError
    with refusing(f"{path} cannot be read as {kind}", *kinds, key="config"):
        return read(file, text)


def _read_yaml(file: Path, depth: int = 0) -> tuple[dict[str, Any], list[str]]:
    """A mapping, merged over the file that its `defaults` names, and what is missing."""
    check_config_file(file, own_types=True)
    kinds = yaml.YAMLError, ValueError, TypeError  # such as dates that do not exist
    with refusing(f"{file} cannot be read as YAML", *kinds, key="config"):
        content = yaml.load(config_text(file), Loader=_Loader)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is not a mapping of keys to values", key="config")
    parent = content.get("defaults")
    if not isinstance(parent, str):
        return content, []
    # Not Path.is_file, which raises an exception for a name that is too long
    is_file = parent.endswith((".yaml", ".yml")) and os.path.isfile(file.parent / parent)
    if depth == MAX_PARENTS or not is_file:
        return content, [f"{parent}, which it inherits from, is not beside it: library defaults are shown"]
    inherited, notes = _read_yaml(file.parent / parent, depth + 1)
    return _merged(inherited, content), notes


class _Loader(yaml.CSafeLoader):
    """Reads unknown tags as plain values."""


def _untagged(loader: Any, suffix: str, node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)


_Loader.add_multi_constructor("!", _untagged)


def _merged(first: Any, second: Any) -> Any:
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return {**first, **{key: _merged(first.get(key), value) for key, value in second.items()}}


def _flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {prefix: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= _flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _of_shell(file: Path, text: str) -> Settings:
    """Options `--key value`, `--key=value` and `key.of.hydra=value` of all commands of a script."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    variables: dict[str, str] = {}
    values: dict[str, Any] = {}
    previous = ""
    for raw in words:
        word = _expanded(raw, variables)
        name, equals, value = word.partition("=")
        key = name.lstrip("-+~")
        if previous and not word.startswith("-"):
            values[previous] = word
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            variables[name] = value if len(value) <= MAX_WORD else ""
        elif equals and re.fullmatch(r"[\w.@/-]+", key):
            values[key] = value
        elif word.startswith("--"):
            values[key] = True
        previous = key if word.startswith("--") and not equals else ""
    return Settings(file.name.lower(), values, frozenset(words))


def _expanded(word: str, variables: dict[str, str]) -> str:
    """A word with the values of its variables, unless it is too long to be a setting."""
    if len(word) > MAX_WORD:
        return word
    return re.sub(
        r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))",
        lambda found: variables.get(found[1] or found[3], found[2] if found[2] is not None else found[0]),
        word,
    )


def _of_python(file: Path, text: str) -> Settings:
    tree = ast.parse(text)
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls: dict[str, dict[str, Any]] = {}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            names.add(_last(node))
        if isinstance(node, ast.Call) and (name := _last(node.func)):
            calls[name] = {k.arg: _literal(k.value, constants) for k in node.keywords if k.arg}
    return Settings(file.name.lower(), {}, frozenset(names), calls)


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # not a literal, or one of no value such as {[]: 1}
        return ast.unparse(node)
