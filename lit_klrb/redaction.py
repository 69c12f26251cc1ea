"""Redaction of configurations that are written or logged: passwords, and values of the environment."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

# What stands for a password.
MASK = "***"
# The last words of keys of such values, apart from a tokenizer's `eos_token` and the like.
_SECRET = re.compile(r"(?i)(.*_)?(token|key|password|passwd|secret|credentials?)")
_TOKENS = re.compile(r"(bos|eos|pad|unk|sep|cls|mask)_token")
# How a text reads the environment, with the name of the variable.
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)")
# `${...}`, with others inside
_INTERPOLATION = re.compile(r"\$\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}")
_LOGGERS = "trainer.logger."


def is_secret(key: str) -> bool:
    """Whether a key is that of a password or the like, by its last word.

    Example:
        >>> is_secret("trainer.logger.api_key"), is_secret("data.max_tokens"), is_secret("model.eos_token")
        (True, False, False)
    """
    name = key.rpartition(".")[2]
    return _SECRET.fullmatch(name) is not None and _TOKENS.fullmatch(name) is None


def environment_names(value: Any) -> set[str]:
    """The variables of the environment that a configuration reads by `${oc.env:NAME}`.

    Example:
        >>> environment_names({"path": ["${oc.env:HOME}/runs"], "steps": 3})
        {'HOME'}
    """
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return set().union(*map(environment_names, parts))
    return {*_ENVIRONMENT.findall(value)} if isinstance(value, str) else set()


def resolved_without_environment(content: dict[Any, Any]) -> dict[Any, Any]:
    """A configuration with its references to other keys resolved, but not those to the environment.

    Example:
        >>> resolved_without_environment({"root": "${oc.env:HOME}", "runs": "${root}/runs", "n": 3})
        {'root': '${oc.env:HOME}', 'runs': '${oc.env:HOME}/runs', 'n': 3}
    """

    def escaped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: escaped(part) for key, part in value.items()}
        if isinstance(value, list):
            return [escaped(part) for part in value]
        return _INTERPOLATION.sub(_unread, value) if isinstance(value, str) else value

    unread: dict[Any, Any] = escaped(content)
    return _resolved(unread)


def _unread(match: re.Match[str]) -> str:
    text = match[0]
    return text.replace("${", r"\${") if environment_names(text) else text


def _resolved(content: dict[Any, Any]) -> dict[Any, Any]:
    container = OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    assert isinstance(container, dict)
    return container


def resolved_with_environment(content: dict[Any, Any]) -> dict[Any, Any]:
    """A configuration with the values of the environment that it reads."""
    return _resolved(content) if environment_names(content) else content


def redacted(values: Any, sources: Mapping[str, Any], key: str = "") -> Any:
    """A configuration as it is written to files and given to loggers.

    Args:
        values: The settings, nested.
        sources: What files and command line have for each key, without `init_args` and `class_path`.
        key: The key of these settings.

    Example:
        >>> settings = {"model": {"init_args": {"path": "/home/me/m"}}, "logger": {"api_key": "f00"}}
        >>> redacted(settings, {"model.path": "${oc.env:HOME}/m"})
        {'model': {'init_args': {'path': '${oc.env:HOME}/m'}}, 'logger': {'api_key': '***'}}
    """
    source = sources.get(key)
    is_class = isinstance(values, dict) and "class_path" in values
    if isinstance(source, str) and environment_names(source) and not is_class:
        return source
    if isinstance(values, dict):
        keys = {name: key if name in ("init_args", "class_path") else f"{key}.{name}" for name in values}
        return {name: redacted(value, sources, keys[name].lstrip(".")) for name, value in values.items()}
    if isinstance(values, list):
        return [redacted(value, sources, f"{key}.{index}") for index, value in enumerate(values)]
    return MASK if isinstance(values, str) and is_secret(key) else values


def without_loggers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, without those of loggers, which are no business of other loggers."""
    return {key: value for key, value in settings.items() if not f"{key}.".startswith(_LOGGERS)}
