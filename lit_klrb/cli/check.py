"""`python -m lit_klrb check`: checks whether runs could start.

With the arguments of `fit` it says what would be trained, with --json for programs. Without arguments,
standard input is a JSON list of command lines of `fit` and standard output a JSON list of answers; a sweep
calls this with every stage and every arm when its plan is made. Settings are parsed, the module, the data
module and the callbacks are instantiated, and configurations and tokenizers of models are loaded, with
arguments the training rows, too; but no trainer is created, no weights of folders are loaded, and a plan's
command lines need no hub.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_klrb import rewards, schema
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.cli import study
from lit_klrb.cli.arguments import Arguments
from lit_klrb.cli.lightning import LitCLI
from lit_klrb.cli.mistakes import ending_of
from lit_klrb.cli.preview import lines as lines_of_rows, preview
from lit_klrb.cli.upstream import PATHS, paths_of
from lit_klrb.cli.warned import quiet
from lit_klrb.data.rows import suffix_of
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators.checked import check_served
from lit_klrb.files import local_path
from lit_klrb.models.bfloat16 import slow_precision
from lit_klrb.models.loading import (
    CLASSIFIER,
    GRAMMAR,
    ITSELF,
    POLICY,
    check_exists,
    is_checkpoint,
    looks_local,
)
from lit_klrb.models.outlines import Outline, outline
from lit_klrb.models.served import is_address
from lit_klrb.models.tokenizers import common_vocabulary
from lit_klrb.reward_functions import KEY

# Arguments of modules that name models, and what the models are used for.
ROLES = {
    **dict.fromkeys(("policy_path", "reference_path"), POLICY),
    **dict.fromkeys(("classifier_path", "reward_path"), CLASSIFIER),
}
# How an unbiased estimator can be biased: by what corrects the later steps on a rollout.
LATER = "after the first step on a rollout"
# Or by settings that change over the run, and are unbiased at its end.
AT_FIRST = "before the last step"
# Their values that name none.
NO_MODELS = (GRAMMAR, ITSELF)
# Arguments of data modules that name data.
DATA = ("source", "preferences")


class CheckCLI(LitCLI):
    """Instantiates what `fit` would train, without training it."""

    def before_instantiate_classes(self) -> None:
        """Check that all inputs exist, folders and data included."""
        super().before_instantiate_classes()
        for section, keys in (("model", PATHS), ("data", DATA)):
            for key in keys:
                for path in paths_of(self.arguments(section).get(key)):
                    if key != "reference_path" or not is_address(path):
                        check_input(key, path)

    def models(self, hub: bool) -> dict[str, Outline]:
        """The models that the run loads, by argument.

        Args:
            hub: Whether hub ids are loaded, too, which a misspelt folder would be taken for.

        Raises:
            ConfigurationError: If one cannot be loaded, or policy and reference have other vocabularies.
        """
        settings = self.arguments("model")
        paths = {key: path for key in ROLES if isinstance(path := settings.get(key), str)}
        found = {
            key: outline(key, path, ROLES[key])
            for key, path in paths.items()
            if (hub or looks_local(path)) and ":" not in path and path not in NO_MODELS
            # A checkpoint without content is one that a plan's stage will write
            if not (is_checkpoint(path) and local_path(path).stat().st_size == 0)
        }
        policy, reference = found.get("policy_path"), found.get("reference_path")
        if policy is not None and reference is not None:
            known = policy.vocabulary or reference.vocabulary or 0
            sides = ((each.words, each.vocabulary or known) for each in (policy, reference))
            common_vocabulary("reference_path", paths["reference_path"], *sides)
        return found

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """None, as the machine that makes the plan need not have the devices of those that run it."""
        return None  # type: ignore[return-value]

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def arguments(self, section: str) -> dict[str, Any]:
        """The resolved arguments of the module or the data module."""
        settings: dict[str, Any] = self.config["fit"][section].init_args.as_dict()
        return settings

    def _slow_precision(self) -> str | None:
        trainer = self.config["fit"].trainer
        on_cpu = trainer.accelerator == "cpu" or not torch.cuda.is_available()
        return slow_precision(str(trainer.precision or ""), torch.device("cpu")) if on_cpu else None

    def answer(self, hub: bool = False) -> dict[str, Any]:
        """The run's module and estimator, and the arguments on which its evaluation depends.

        Args:
            hub: Whether models of the hub are loaded, and the training rows read.
        """
        kl = self.config_init["fit"]["kl"]
        data = self.arguments("data")
        answer: dict[str, Any] = {
            "module": type(self.model).__name__,
            "models": {
                key: {**found.shown(), "path": self.arguments("model")[key]}
                for key, found in self.models(hub).items()
            },
            "prompts": {key: data[key] for key in ("source", "train_size", "batch_size") if key in data},
            "rows": preview(self.datamodule, self.arguments("model")) if hub else None,
            "steps": self.config["fit"].trainer.max_steps,
            "slow": self._slow_precision(),
            "estimator": None,
        }
        if getattr(self.model, "uses_kl_estimator", False):
            kl.memory.check_trainable(self.model.optimizer_steps)
            if getattr(self.model, "is_served", False):
                check_served(kl.memory.estimator)
            answer["estimator"] = {
                "name": type(kl.memory.estimator).__name__,
                "optimises": _objective(kl, self.model.optimizer_steps),
                "biased": _biased(kl, self.model.optimizer_steps),
            }
        parts = (key.split(".") for key in schema.EVALUATED_WITH)
        answer["evaluation"] = {
            f"{section}.init_args.{key}": self.arguments(section)[key]
            for section, key in parts
            if section != "trainer" and key in self.arguments(section)
        }
        trainer = self.config["fit"].trainer
        answer["evaluation"]["trainer.precision"] = trainer.precision
        answer["evaluation"][schema.LIMIT_VAL_BATCHES] = trainer.limit_val_batches
        return answer


def _objective(kl: KLEstimatorCallback, steps: int) -> str | None:
    """What the gradient optimises; an estimator may be biased by its settings alone, which may change."""
    estimator, about = kl.memory.estimator, kl.memory.estimator.explanation
    if about is None:
        return None
    passing = kl.memory.passing_bias
    by_settings = estimator.refusal is None and estimator.bias is not None and passing is None
    found = [f"not {about.optimises}: {estimator.bias}" if by_settings else about.optimises]
    if _is_biased_later(kl, steps):
        found.append(
            f"biased after the first of {steps} steps on a rollout (off_policy {estimator.off_policy})"
        )
    if passing is not None:
        found.append(passing)
    else:
        found += [f"the {name} changes to {last:g} over the run" for name, last in kl.memory.finals.items()]
    return "; ".join(found)


def _biased(kl: KLEstimatorCallback, steps: int) -> bool | str:
    """Whether the gradient is biased, or when."""
    passing = kl.memory.passing_bias is not None
    if kl.memory.estimator.bias is not None and not passing:
        return True
    return " and ".join([AT_FIRST] * passing + [LATER] * _is_biased_later(kl, steps)) or False


def _is_biased_later(kl: KLEstimatorCallback, steps: int) -> bool:
    """Whether the gradient is biased from the second step on a rollout on."""
    return steps > 1 and kl.memory.estimator.off_policy not in ("prefix", "sequence")


def check_input(key: str, path: str) -> None:
    """Check that a path exists or a function can be imported; hub ids pass.

    Raises:
        ConfigurationError: If not; names the argument and the path.
    """
    if key == KEY and ":" in path and not is_checkpoint(path):
        rewards.load_reward(path)
    elif suffix_of(Path(path)) and not local_path(path, key).exists():
        raise ConfigurationError(f"{path} does not exist", key=key)
    else:
        check_exists(key, path)


def check(argv: Sequence[str], hub: bool = False) -> dict[str, Any]:
    """Check whether a run could start.

    Args:
        argv: A command line: "fit" or "study", and its arguments.
        hub: Whether models of the hub are loaded.

    Returns:
        Either {"error": one line} or {"module": class name or None, "models": {key: {"type", "vocabulary"}},
        "prompts": {key: value}, "rows": see `preview` or None, "steps": number, "slow": line or None,
        "estimator": {"name", "optimises", "biased"} or None,
        "evaluation": {key: value}}; a study has no models, prompts and steps.
    """
    try:
        if argv[:1] == ["study"]:
            study.parse(argv[1:])
            return {"module": None, "estimator": None, "evaluation": {}}
        return CheckCLI(argv).answer(hub)
    except Exception as error:
        ended = ending_of(error, {})
        return {"error": str(ended) if ended else " ".join(f"{type(error).__name__}: {error}".split())}


def main(argv: Sequence[str]) -> int:
    """Check the run of the given arguments, or without arguments those on standard input.

    Args:
        argv: Arguments of `fit`.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: If the run could not start, or standard input is not a JSON list of command lines.
    """
    parser = Arguments(prog="python -m lit_klrb check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the answer for programs")
    known, options = parser.parse_known_args(argv)
    requests = [["fit", *options]] if options else _requests()
    quiet()
    with redirect_stdout(sys.stderr):  # constructors may print, and standard output is for the answers
        answers = [check(request, hub=bool(options)) for request in requests]
    if options and "error" in answers[0]:
        raise ConfigurationError(answers[0]["error"])
    if options and not known.json:
        print("\n".join(_lines(answers[0])))
    else:
        json.dump(answers[0] if options else answers, sys.stdout, indent=1 if options else None)
    return 0


def _lines(answer: dict[str, Any]) -> list[str]:
    """What would be trained, for a reader."""
    models = [f"{key} {found['path']} ({found['type']})" for key, found in answer["models"].items()]
    estimator = answer["estimator"]
    steps, size = answer["steps"], answer["prompts"].get("batch_size")
    lines = [
        f"model: {answer['module']}{': ' if models else ''}{', '.join(models)}",
        f"data: {', '.join(f'{key} {value}' for key, value in answer['prompts'].items())}",
        *(lines_of_rows(answer["rows"]) if answer["rows"] else []),
        f"length: {steps} steps" + (f" of {size} rows" if size else ""),
    ]
    if estimator is not None:
        biased = "unbiased" if estimator["biased"] is False else "biased"
        if isinstance(estimator["biased"], str):
            biased += f" {estimator['biased']}"
        lines.append(f"estimator: {estimator['name']}, {biased}; optimises {estimator['optimises']}")
    if answer["slow"]:
        lines.append(answer["slow"])
    return [*lines, "everything that fit checks before the first step is in order; --json for programs"]


def _requests() -> list[list[str]]:
    """The command lines on standard input."""
    try:
        requests = json.load(sys.stdin)
    except ValueError:
        requests = None
    lists = isinstance(requests, list) and all(isinstance(argv, list) for argv in requests)
    texts = lists and all(isinstance(word, str) for argv in requests for word in argv)
    if not (texts and all(argv[:1] in (["fit"], ["study"]) for argv in requests)):
        raise ConfigurationError("standard input must be a JSON list of command lines of fit or study")
    return requests
