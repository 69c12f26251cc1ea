"""`lit-klrb check`: checks whether runs could start.

With the arguments of `fit` it says what would be trained, with --json for programs. Without arguments,
standard input is a JSON list of command lines of `fit` and standard output a JSON list of answers; a sweep
calls this with every stage and every arm when its plan is made. The run is set up by what sets it up in
`fit`, with models that are made from configurations, without the weights of folders. The checkpoint of a run
that a line before has checked is known, too. A plan's command lines need no hub and no device, and of the
rows only a few of the embedded world's.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.loggers.logger import DummyLogger

from lit_klrb import rewards, schema
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.cli.arguments import Arguments
from lit_klrb.cli.error_translation import ending_of, quiet
from lit_klrb.cli.lightning import LitCLI
from lit_klrb.cli.settings_checker import MISSING
from lit_klrb.cli.upstream import named_paths, paths_of
from lit_klrb.data.base import CorpusDataModule
from lit_klrb.data.batches import pad as padded
from lit_klrb.data.rows import suffix_of
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import check_target, local_path
from lit_klrb.models.dry_run import DryRun, PlannedModel, UnknownModelError, dry_running
from lit_klrb.models.loading import GRAMMAR, check_exists, is_checkpoint
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.base import TrainedModule
from lit_klrb.modules.regularised import RegularisedModule
from lit_klrb.reward_functions import KEY, FunctionReward, TrainerState
from lit_klrb.rewards import TrainingReward
from lit_klrb.run.lightning_internals import attach
from lit_klrb.studies.base import PolicyStudy
from lit_klrb.terminal import print_lines

# How an unbiased estimator can be biased: by what corrects the later steps on a rollout.
LATER = "after the first step on a rollout"
# Or by settings that change over the run, and are unbiased at its end.
AT_FIRST = "before the last step"
# Rows of each split that are read when a plan is made.
FEW = 64
# Arguments of data modules that name data.
DATA = ("source", "preferences")


class CheckCLI(LitCLI):
    """Sets up what `fit` would train by the methods that `fit` calls, with models that have no weights."""

    def __init__(self, args: Sequence[str], planned_models: dict[Path, PlannedModel] | None) -> None:
        self.dry_run, self.is_here = DryRun(planned_models), planned_models is None
        self.rows: dict[str, Any] | None = None
        self.dtypes: str | None = None
        super().__init__(args)

    def before_instantiate_classes(self) -> None:
        """Check that all inputs exist, folders and data included."""
        super().before_instantiate_classes()
        if self.is_here:
            root = self.config["fit"].trainer.default_root_dir
            check_target(Path(root) / schema.CHECKPOINT, "trainer.default_root_dir")
        data = self.arguments("data")
        paths = [(key, path) for key in DATA for path in paths_of(data.get(key))]
        for key, path in named_paths(self.arguments("model")) + paths:
            check_input(key, path)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """As `fit` does; a plan's machine need not have the devices of those that run it."""
        config = self._get(self.config_init, "trainer")
        config.enable_progress_bar = False
        elsewhere = ("auto", "gpu", *(name for name, _ in AcceleratorRegistry.items() if name != "cpu"))
        if not self.is_here and config.accelerator in elsewhere:
            config.accelerator, config.devices, config.num_nodes = "cpu", 1, 1
            if str(config.precision).startswith("16"):
                config.precision = "bf16-mixed"
            if not isinstance(config.strategy, str):
                config.strategy = "auto"
        trainer = super().instantiate_trainer(**kwargs)
        trainer.loggers = [DummyLogger()]  # in place of those that write
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """What `fit` does before it reads weights."""
        module, data = self.model, self.datamodule
        attach(self.trainer, module, data)
        if not isinstance(module, TrainedModule) or not isinstance(data, CorpusDataModule):
            return  # setting up those of others can take any time
        data.check_module("fit")
        paths = [path for key in DATA for path in paths_of(self.arguments("data").get(key))]
        if reads_rows := self.is_here or paths == [GRAMMAR]:
            if not self.is_here:
                data.at_most = FEW
            data.setup("fit")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            callback.setup(self.trainer, module, "fit")
        module.setup("fit")
        with suppress(UnknownModelError), dry_running(self.dry_run):
            module.configure_model()
        if hasattr(module, module.role.name):
            self.dtypes = module.dtypes if self.is_here else None
            self.rows = data.preview(module) if reads_rows else None
            if self.rows and self.is_here:
                try_rewards(module, data)
                for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(callback, PolicyStudy):
                        callback.check_prompts(len(data.examined["train"]), *callback.needs)
            if self.dry_run.planned_models is not None:
                model = PlannedModel(module.role.name, module.trained, module.tokenizer)
                self.dry_run.planned_models[self.directory.checkpoint.absolute()] = model

    def arguments(self, section: str) -> dict[str, Any]:
        """The resolved arguments of the module or the data module."""
        settings: dict[str, Any] = self.config["fit"][section].get("init_args", Namespace()).as_dict()
        return settings

    def answer(self) -> dict[str, Any]:
        """The run's module and estimator, and the arguments on which its evaluation depends."""
        kl = self.config_init["fit"]["kl"]
        data = self.arguments("data")
        answer: dict[str, Any] = {
            "module": type(self.model).__name__,
            "models": self.dry_run.models,
            "dtypes": self.dtypes,
            "prompts": {k: data[k] for k in (*DATA, "train_size", "batch_size") if data.get(k) is not None},
            "rows": self.rows,
            "steps": self.config["fit"].trainer.max_steps,
            "processes": self.trainer.num_devices * self.trainer.num_nodes,
            "unread": self.unread,
            "moves_reference": getattr(self.model, "reference_update", None) is not None,
            "estimator": None,
        }
        if getattr(self.model, "uses_kl_estimator", False):
            name, steps = type(kl.memory.estimator).__name__, self.model.optimizer_steps
            about = {"optimises": kl.memory.statement(steps), "biased": _biased(kl, steps)}
            answer["estimator"] = {"name": name, **about}
        parts = (key.split(".") for key in schema.EVALUATED_WITH)
        answer["evaluation"] = {
            f"{section}.init_args.{key}": self.arguments(section)[key]
            for section, key in parts
            if section != "trainer" and key in self.arguments(section)
        }
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        answer["monitors"] = [m for c in callbacks if (m := getattr(c, "monitor", None))]
        trainer = self.config["fit"].trainer
        answer["evaluation"]["trainer.precision"] = trainer.precision
        answer["evaluation"][schema.LIMIT_VAL_BATCHES] = trainer.limit_val_batches
        return answer


def try_rewards(module: TrainedModule, data: CorpusDataModule) -> None:
    """Call the functions among the rewards on two prompts, each with its own text as the completion."""
    if not isinstance(module, RegularisedModule) or not hasattr(module, "pair"):
        return
    prompts, pad = data.examined["validation"][:2], module.tokenizer.pad_token_id
    batch, completions = data.collate("validation", prompts), [prompt.tokens for prompt in prompts]
    answers = padded(completions, pad, side="right")
    tokens, attention = (torch.cat([batch[n], answers[n]], 1) for n in ("tokens", "attention_mask"))
    rollout = Rollout(tokens, attention, answers["attention_mask"])
    state = TrainerState(0, module.trainer.max_steps), False
    for function, _ in getattr(getattr(module.reward, "reward", None), "parts", ()):
        if isinstance(function, FunctionReward):
            module.pair.rewards(TrainingReward(function, lambda: state), rollout, batch)


def _biased(kl: KLEstimatorCallback, steps: int) -> bool | str:
    """Whether the gradient is biased, or when."""
    passing = kl.memory.passing_bias is not None
    if kl.memory.estimator.bias is not None and not passing:
        return True
    return " and ".join([AT_FIRST] * passing + [LATER] * kl.memory.is_biased_later(steps)) or False


def check_input(key: str, path: str) -> None:
    """Check that a path exists or a function can be imported; hub ids pass."""
    if key == KEY and ":" in path and not is_checkpoint(path):
        rewards.load_reward(path)
    elif suffix_of(Path(path)) and not local_path(path, key).exists():
        raise ConfigurationError(f"{path} does not exist", key=key)
    else:
        check_exists(key, path)


def check(argv: Sequence[str], planned_models: dict[Path, PlannedModel] | None = None) -> dict[str, Any]:
    """Check whether a run could start.

    Args:
        argv: A command line: "fit" and its arguments.
        planned_models: In a plan, what the runs checked before will write, to which this run is added; None
            for a run that would start here and now.

    Returns:
        Either {"error": one line} or {"module": class name or None, "models": {key: {"type", "vocabulary"}},
        "dtypes": one line or None, "prompts": {key: value}, "rows": numbers and the first row or None,
        "steps": number, "processes": number, "unread": [key that the module does not read],
        "moves_reference": whether it follows the policy,
        "estimator": {"name", "optimises", "biased"} or None,
        "evaluation": {key: value}, "monitors": [metric]}.
    """
    try:
        return CheckCLI(argv, planned_models).answer()
    except Exception as error:
        ended = ending_of(error, {})
        return {"error": str(ended) if ended else " ".join(f"{type(error).__name__}: {error}".split())}


def main(argv: Sequence[str]) -> int:
    """Check the run of the given arguments, or without arguments those on standard input."""
    parser = Arguments("check", __doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the answer for programs")
    known, options = parser.parse_known_args(argv)
    requests = [["fit", *options]] if options else _requests()
    quiet()
    with redirect_stdout(StringIO()) as said:  # standard output is for the answers
        planned_models: dict[Path, PlannedModel] = {}
        answers = [check(request, None if options else planned_models) for request in requests]
    if options and "error" in answers[0]:
        raise ConfigurationError(answers[0]["error"])
    sys.stderr.write(said.getvalue())
    if options and not known.json:
        print_lines(*_lines(answers[0]))
        print("OK: no problem found before the first step (machine-readable: --json)", file=sys.stderr)
    else:
        print(json.dumps(answers[0] if options else answers, indent=1 if options else None))
    return 0


def _lines(answer: dict[str, Any]) -> list[str]:
    """What would be trained, for a reader: model, rows, first row, estimator, time."""
    models = [f"{key} {model['path']} ({model['type']})" for key, model in answer["models"].items()]
    weights = [answer["dtypes"]] if answer["dtypes"] else []
    shown, estimator, prompts = answer["rows"], answer["estimator"], answer["prompts"]
    data, size = [prompts[key] for key in DATA if key in prompts], prompts.get("batch_size")
    if size and answer["processes"] > 1:
        size = f"{answer['processes']} x {size}"
    about = f"none, as {answer['module']} uses none"
    if estimator is not None:
        known = estimator["optimises"]
        about = estimator["name"] + (f"; optimises {known}" if known else "")
    lines = [
        f"model: {answer['module']}{': ' if models or weights else ''}{', '.join([*models, *weights])}",
        f"rows: of {' and '.join(data) or 'your own'}" + (f", {_rows(shown)}" if shown else ""),
        *([f"first row: {shown['first']}".replace("\n", "\\n")] if shown else []),
        f"estimator: {about}",
        f"time: {answer['steps']} steps{f' of {size} rows' if size else ''}, timed by fit as it goes",
    ]
    if answer["monitors"]:
        names = ", ".join(answer["monitors"])
        lines.append(
            f"not checked: {names}; fit knows what is logged after the evaluation before the first step"
        )
    return lines


def _rows(shown: dict[str, Any]) -> str:
    """The numbers of rows, for a reader."""
    left_out = sum(shown["left_out"].values())
    why = ", ".join(f"{count} {reason}" for reason, count in shown["left_out"].items())
    counts = f"{shown['rows']} {shown['kind']}, {left_out} left out" + (f" ({why})" if why else "")
    if shown["cut"]:
        counts += f", {shown['cut']} cut"
    if shown["longest_tokens"]:
        counts += f"; tokens: median {shown['median_tokens']:g}, longest {shown['longest_tokens']}"
    return counts


def _requests() -> list[list[str]]:
    """The command lines on standard input."""
    if sys.stdin.isatty():
        raise ConfigurationError(MISSING)
    with suppress(ValueError):
        requests = json.load(sys.stdin)
        lists = isinstance(requests, list) and all(isinstance(argv, list) for argv in requests)
        texts = lists and all(isinstance(word, str) for argv in requests for word in argv)
        if texts and all(argv[:1] == ["fit"] for argv in requests):
            return requests
    raise ConfigurationError("standard input must be a JSON list of command lines of fit")
