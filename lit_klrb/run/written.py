"""What is written of a configuration: no value of the environment, no password, no settings of loggers."""

import re
from collections.abc import Mapping
from typing import Any

from lit_klrb.config_files import reads_environment

# What stands for a value that is not written.
MASK = "***"
# The last words of keys of such values, apart from a tokenizer's `eos_token` and the like.
_SECRET = re.compile(r"(?i)(.*_)?(token|key|password|passwd|secret|credentials?)")
_TOKENS = re.compile(r"(bos|eos|pad|unk|sep|cls|mask)_token")
LOGGERS = "trainer.logger"


def is_secret(key: str) -> bool:
    """Whether a key is that of a password or the like, by its last word.

    Example:
        >>> is_secret("trainer.logger.api_key"), is_secret("data.max_tokens"), is_secret("model.eos_token")
        (True, False, False)
    """
    name = key.rpartition(".")[2]
    return _SECRET.fullmatch(name) is not None and _TOKENS.fullmatch(name) is None


def written(values: Any, sources: Mapping[str, Any], key: str = "") -> Any:
    """A configuration as it is written to files and given to loggers.

    Args:
        values: The settings, nested.
        sources: What files and command line have for each key, without `init_args` and `class_path`.
        key: The key of these settings.

    Example:
        >>> settings = {"model": {"init_args": {"path": "/home/me/m"}}, "logger": {"api_key": "f00"}}
        >>> written(settings, {"model.path": "${oc.env:HOME}/m"})
        {'model': {'init_args': {'path': '${oc.env:HOME}/m'}}, 'logger': {'api_key': '***'}}
    """
    source = sources.get(key)
    if reads_environment(source) and not (isinstance(values, dict) and "class_path" in values):
        return source
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        parts = {
            name: written(
                value, sources, key if name in ("init_args", "class_path") else f"{key}.{name}".lstrip(".")
            )
            for name, value in items
        }
        return parts if isinstance(values, dict) else [*parts.values()]
    return MASK if isinstance(values, str) and is_secret(key) else values


def without_loggers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key that every logger may see: one logger's are no business of the others."""
    return {key: value for key, value in settings.items() if not f"{key}.".startswith(f"{LOGGERS}.")}
