"""What a command line sets, as keys and values in the order given; and the estimator if it sets none."""

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from lit_klrb.config_files import check_config_file
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD
from lit_klrb.redaction import MASK, environment_names, resolved_without_environment

PACKAGE = "lit_klrb.estimators"
# The value of the parser: the default of modules with a reward
WITH_REWARD = {"class_path": f"{PACKAGE}.{DEFAULT.__name__}"}
# Options that are put in front of those of modules without a reward; later ones and files replace them
OPTIONS_WITHOUT_REWARD = (
    f"--kl.estimator={PACKAGE}.{WITHOUT_REWARD.__name__}",
    f"--kl.estimator.discount={ANNEALED[0]}",
    f"--kl.final_discount={ANNEALED[1]}",
)
# Settings of new weights, and the paths of models that can be given in their place.
NEW_WEIGHTS = {"policy_config": ["policy_path"], "classifier_config": ["classifier_path", "backbone_path"]}
# The keys of a sweep's plan, which is not a configuration of a run.
PLAN_KEYS = {"stages", "grid", "primary"}
# Options that set nothing, and need no value
FLAGS = ("-h", "--help", "--print_config")


def settings_of(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; those of a file are its sections.

    Values of options stay text, unless they are null, a list or a mapping.

    Example:
        >>> list(settings_of(["--kl.beta", "0.1", "--trainer.callbacks+=[Timer]"]))
        [('kl.beta', '0.1'), ('trainer.callbacks', ['Timer'])]
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        if not option.startswith("-"):
            raise ConfigurationError(f"{word}: an option is expected; a configuration is named by --config")
        if option in FLAGS:
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigurationError(f"{option}: a value is expected")
            text = rest.pop(0)
        if option in ("-c", "--config"):
            yield from _sections(text).items()
        else:
            yield option.lstrip("-").rstrip("+"), _value(text)


def given_settings(words: Sequence[str]) -> dict[str, Any]:
    """What a command line sets, by key as of `option_key`; later ones win.

    Example:
        >>> given_settings(["--model", "RLOOModule", "--kl.estimator.class_path=MonteCarlo"])
        {'model': 'RLOOModule', 'kl.estimator': 'MonteCarlo'}
    """
    flat = (flattened(value, key) for key, value in settings_of(words))
    return {option_key(f"--{key}"): value for settings in flat for key, value in settings.items()}


def _sections(path: str) -> dict[str, Any]:
    """What a configuration file has; it may be given as a mapping on the command line."""
    content = _value(path)
    if not isinstance(content, dict):
        check_config_file(Path(path))
        content = yaml.load(Path(path).read_text("utf-8-sig"), yaml.CSafeLoader)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: a mapping of keys to values is expected")
    if content.keys() >= PLAN_KEYS:
        line = f"is the plan of a sweep; run it with: lit-klrb sweep --config {path}"
        raise ConfigurationError(f"{path} {line}")
    if "config" in content:
        raise ConfigurationError(f"{path}: config: no file names another; give each with --config")
    if odd := [key for key in _keys(content) if not isinstance(key, str)]:
        raise ConfigurationError(f"{path}: Key must be a string, got: {odd[0]!r}")
    with contextlib.suppress(OmegaConfBaseException):  # the parser says what is wrong
        return resolved_without_environment(content) if environment_names(content) else content
    return content


def _keys(content: Any) -> Iterator[Any]:
    items = content.items() if isinstance(content, dict) else ()
    for key, value in items:
        yield key
        yield from _keys(value)


def _value(text: str) -> Any:
    if text[:1] not in ("[", "{") and text != "null":
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    # {step} is a text with a placeholder, not the mapping {step: null}
    is_text = isinstance(value, dict) and bool(value) and all(part is None for part in value.values())
    return text if is_text else value


def flattened(config: Any, key: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to plain values by dotted key.

    Example:
        >>> flattened({"a": {"b": [1, {"c": 2}]}})
        {'a.b.0': 1, 'a.b.1.c': 2}
    """
    if isinstance(config, Mapping):
        items = list(config.items())
    elif isinstance(config, list):
        items = list(enumerate(config))
    else:
        items = []
    if not items:
        return {key: config}
    return {k: v for name, part in items for k, v in flattened(part, f"{key}.{name}".lstrip(".")).items()}


def option_key(word: str) -> str:
    """The key that an option sets, without `init_args` and `class_path`; empty for other words.

    Example:
        >>> option_key("--model.init_args.seed=3"), option_key("--trainer.callbacks+=Timer"), option_key("3")
        ('model.seed', 'trainer.callbacks', '')
    """
    key = word.removeprefix("--").partition("=")[0].rstrip("+").removesuffix(".class_path")
    return key.replace(".init_args.", ".") if word.startswith("--") else ""


def prefer_given_model(words: Sequence[str], arguments: MutableMapping[str, Any]) -> None:
    """Drop the new weights among a module's arguments, from a file, where an option names a model."""
    set_by_option = {".".join(option_key(word).split(".")[:2]) for word in words}
    for setting, paths in NEW_WEIGHTS.items():
        set_paths = [path for path in paths if arguments.get(path) is not None]
        named = set_by_option & {f"model.{path}" for path in set_paths}
        if named and arguments.get(setting) is not None and f"model.{setting}" not in set_by_option:
            arguments[setting] = None


def default_options(settings: dict[str, Any], module: object) -> tuple[str, ...]:
    """Options with the default estimator of a module's class, if that is another one than the parser's."""
    named = settings.get("kl") or settings.get("kl.estimator")
    return () if named or getattr(module, "trains_on_reward", True) else OPTIONS_WITHOUT_REWARD


def check_text(settings: Mapping[str, Any]) -> None:
    """Refuse text that no file name and no log can hold, and what stands for a value that was not written."""
    for key, value in settings.items():
        if value == MASK:
            text = f"{MASK} stands for a value that is not written; set it, or read it by ${{oc.env:NAME}}"
            raise ConfigurationError(text, key=key)
        texts = [key, value] if isinstance(value, str) else [key]
        if any(re.search("[\0\ud800-\udfff]", text) for text in texts):
            problem = "is not text: it has a null character or a lone surrogate"
            raise ConfigurationError(f"{value!r} {problem}", key=key)
