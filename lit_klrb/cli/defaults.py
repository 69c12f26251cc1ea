"""What a command line sets before it is parsed, and the KL estimator of runs that name none."""

import contextlib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from lit_klrb.cli.mistakes import flattened
from lit_klrb.config_files import check_config_file
from lit_klrb.estimators.advice import ANNEALED, DEFAULT, WITHOUT_REWARD
from lit_klrb.modules import DistillModule

PACKAGE = "lit_klrb.estimators"
# The value of the parser: the default of modules with a reward
WITH_REWARD = {"class_path": f"{PACKAGE}.{DEFAULT.__name__}"}
# Options that are put in front of those of modules without a reward; later ones and files replace them
OPTIONS_WITHOUT_REWARD = (
    f"--kl.estimator={PACKAGE}.{WITHOUT_REWARD.__name__}",
    f"--kl.estimator.discount={ANNEALED[0]}",
    f"--kl.final_discount={ANNEALED[1]}",
)


def given_settings(words: Sequence[str]) -> dict[str, Any]:
    """What options and configuration files set, by key as of `option_key`; later ones win.

    Args:
        words: The command line. The parser says what is wrong with it or with a file.

    Example:
        >>> given_settings(["--model", "RLOOModule", "--kl.estimator.class_path=MonteCarlo"])
        {'model': 'RLOOModule', 'kl.estimator': 'MonteCarlo'}
    """
    found: dict[str, Any] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        value = value if equals else following
        is_file = option in ("-c", "--config")
        if not (is_file or option.startswith("--")):
            continue
        content: Any = {} if is_file else value
        with contextlib.suppress(ValueError, OSError, RecursionError, yaml.YAMLError):
            if is_file:
                check_config_file(Path(value))
                content = yaml.safe_load(Path(value).read_text("utf-8-sig"))
            elif value.startswith("{"):
                content = yaml.safe_load(value)
            settings = flattened(content, "" if is_file else option_key(option))
            found |= {option_key(f"--{key}"): setting for key, setting in settings.items()}
    return found


def default_options(given: dict[str, Any]) -> tuple[str, ...]:
    """Options with the default estimator of the module, if that is another one than the parser's.

    Args:
        given: What the command line sets. It names an estimator by its class, not by settings of one.
    """
    without_reward = str(given.get("model")).rpartition(".")[2] == DistillModule.__name__
    named = given.get("kl") or given.get("kl.estimator")
    return OPTIONS_WITHOUT_REWARD if without_reward and not named else ()


def option_key(word: str) -> str:
    """The key that an option sets, without `init_args` and `class_path`; empty for other words.

    Example:
        >>> option_key("--model.init_args.seed=3"), option_key("--trainer.callbacks+=Timer"), option_key("3")
        ('model.seed', 'trainer.callbacks', '')
    """
    key = word.removeprefix("--").partition("=")[0].rstrip("+").removesuffix(".class_path")
    return key.replace(".init_args.", ".") if word.startswith("--") else ""
