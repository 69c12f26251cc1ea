"""`python -m lit_klrb check`: whether runs could start, found out before the first of them does.

A sweep asks this of every stage and every arm when its plan is made. Standard input holds a JSON list of
command lines of `fit`; standard output gets a JSON list with one answer to each. Settings are parsed, and the
module, the data module and the callbacks are built; no trainer is made and no weights are loaded.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L

from lit_klrb import rewards
from lit_klrb.cli.lightning import LitCLI, quiet
from lit_klrb.cli.mistakes import EndedError
from lit_klrb.cli.upstream import PATHS, paths_of
from lit_klrb.data.tables import READERS
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import check_exists, is_checkpoint

# Arguments that decide what the common evaluation measures: runs that differ in one cannot be compared.
EVALUATION = {
    "model": (
        *("reference_path", "reward_path", "reward_label", "reward_output", "max_new_tokens", "stop_at_eos"),
        *("temperature", "evaluation_completions", "evaluation_seed"),
    ),
    "data": ("source", "eval_size", "eval_batch_size", "min_prompt_tokens", "max_prompt_tokens"),
}


# Where a data module says what it reads.
DATA = ("source", "preferences")


class CheckCLI(LitCLI):
    """Builds what `fit` would train, and stops there."""

    def before_instantiate_classes(self) -> None:
        """Refuse what is missing on this machine, folders and data included."""
        super().before_instantiate_classes()
        for section, keys in (("model", PATHS), ("data", DATA)):
            for key in keys:
                for path in paths_of(self.arguments(section).get(key)):
                    check_input(key, path)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """None: the machine that plans need not have the devices of those that run."""
        return None  # type: ignore[return-value]

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def arguments(self, section: str) -> dict[str, Any]:
        """The resolved arguments of the module or of the data module."""
        settings: dict[str, Any] = self.config["fit"][section].init_args.as_dict()
        return settings

    def answer(self) -> dict[str, Any]:
        """What the run would optimise, and what its evaluation would depend on."""
        estimator = self.config_init["fit"]["kl"].estimator
        found: dict[str, Any] = {"module": type(self.model).__name__, "estimator": None}
        if getattr(self.model, "uses_kl_estimator", False):
            about = estimator.explanation
            found["estimator"] = {
                "name": type(estimator).__name__,
                "optimises": None if about is None else about.optimises,
                "biased": estimator.refusal is not None,
            }
        found["evaluation"] = {
            f"{section}.init_args.{key}": self.arguments(section)[key]
            for section, keys in EVALUATION.items()
            for key in keys
            if key in self.arguments(section)
        }
        return found


def check_input(key: str, path: str) -> None:
    """Refuse a path that is not there and a function that cannot be imported; hub ids pass.

    Raises:
        ConfigurationError: With the argument and the path.
    """
    if key == rewards.KEY and ":" in path and not is_checkpoint(path):
        rewards.load_reward(path)
    elif Path(path).suffix in READERS and not Path(path).expanduser().exists():
        raise ConfigurationError(f"{path} does not exist", key=key)
    else:
        check_exists(key, path)


def check(argv: Sequence[str]) -> dict[str, Any]:
    """Whether a run could start.

    Args:
        argv: A command line: "fit" and its arguments.

    Returns:
        Either {"error": one line} or {"module": class name, "estimator": {"name", "optimises", "biased"} or
        None, "evaluation": {key: value}}.
    """
    try:
        return CheckCLI(argv).answer()
    except EndedError as ended:
        return {"error": ended.line}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def main() -> int:
    """Answer the command lines on standard input; the exit code.

    Raises:
        ConfigurationError: If standard input holds no JSON list of lists of strings.
    """
    try:
        requests = json.load(sys.stdin)
    except ValueError:
        requests = None
    if not _are_command_lines(requests):
        raise ConfigurationError("a JSON list of command lines is expected on standard input")
    quiet()
    with redirect_stdout(sys.stderr):  # what builders print must not mix with the answers
        answers = [check(argv) for argv in requests]
    json.dump(answers, sys.stdout)
    return 0


def _are_command_lines(requests: Any) -> bool:
    lists = isinstance(requests, list) and all(isinstance(argv, list) for argv in requests)
    return lists and all(isinstance(word, str) for argv in requests for word in argv)
