"""Lightning CLI with this project's defaults, and one-line messages for wrong input."""

import copy
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

import lit_klrb.data.modules
import lit_klrb.modules
import lit_klrb.studies  # noqa: F401  their classes are what short names in a config resolve to
from lit_klrb import schema
from lit_klrb.callbacks import (
    KLEstimatorCallback,
    PredictionWriter,
    RunCheckpoint,
    RunRecorder,
    StopBetweenSteps,
)
from lit_klrb.callbacks.plug_in import unread_settings
from lit_klrb.cli.command_line import (
    WITH_REWARD,
    check_text,
    default_options,
    flattened,
    given_settings,
    prefer_given_model,
)
from lit_klrb.cli.error_translation import EndedError, ending_of, interrupted, quiet, warn_once_per_line
from lit_klrb.cli.resume import resumed_run
from lit_klrb.cli.setting_types import named, subclasses
from lit_klrb.cli.settings_checker import OneLineParser, SettingsChecker
from lit_klrb.cli.trainer import TRAINER_DEFAULTS, prepare_trainer, refuse_option
from lit_klrb.cli.upstream import INITIAL, check_upstream
from lit_klrb.distributed import LOST, check_started, check_strategy
from lit_klrb.errors import ConfigurationError, error_line
from lit_klrb.estimators.advice import DEFAULT
from lit_klrb.models.roles import CLASSIFIER
from lit_klrb.redaction import redacted, without_loggers
from lit_klrb.run.directory import RunDirectory, check_named
from lit_klrb.run.lightning_internals import say_before_kill
from lit_klrb.run.loggers import run_loggers, tell_loggers
from lit_klrb.run.options import check_training_options
from lit_klrb.run.same_run import record

# Upper bound of seeds, from NumPy's generator.
MAX_SEED = 2**32
DEFAULTS = TRAINER_DEFAULTS | {
    "kl.estimator": WITH_REWARD,
    "checkpoint.filename": Path(schema.CHECKPOINT).stem,
    "checkpoint.enable_version_counter": False,
}


class LitCLI(LightningCLI):
    """LightningCLI with modules and data by class name, a run directory, and the KL plug-in under `kl`."""

    # The parser of each command, and the arguments of the trainer's method
    parsers: ClassVar[dict[str, tuple[LightningArgumentParser, list[str]]]] = {}

    def __init__(self, args: Sequence[str]) -> None:
        # The id of the run to resume, "" if its checkpoint has none; None for a new run.
        self.resumed: str | None = None
        self._command, *self._words = args or [""]
        self._given = given_settings(self._words)
        self.config: Any = None
        try:
            super().__init__(
                model_class=L.LightningModule,
                datamodule_class=L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=None,
                parser_class=OneLineParser,
                parser_kwargs={"parser_mode": "omegaconf", "prog": "lit-klrb"},
                seed_everything_default=0,
                auto_configure_optimizers=False,
                args=[*args[:1], *default_options(self._given, self._module()), *self._words],
            )
        except Exception as error:
            ended = ending_of(error, self.settings)
            if ended is None or ended is error:
                raise
            raise ended from error

    def _module(self) -> object:
        """The class of the module, or the function that makes it; None if there is none of this name."""
        known = {kind.__name__: kind for kind in subclasses(L.LightningModule)}
        return named(str(self._given.get("model")), known)[0]

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the command that is run, as building the parser of each command takes time."""
        every = LightningCLI.subcommands()
        return {self._command: every[self._command]} if self._command in every else every

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        """Built once per process: the check of a plan parses many command lines."""
        if subcommand not in self.parsers:
            parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
            self.parsers[subcommand] = parser, self._subcommand_method_arguments[subcommand]
        parser, self._subcommand_method_arguments[subcommand] = self.parsers[subcommand]
        return copy.copy(parser)  # which is told its parent, and with it this run

    def _dump_config(self) -> None:
        """Convert the settings to hyperparameters without another check of their types, which takes time."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(
                self.config, skip_link_targets=False, skip_none=False, skip_validation=True
            )
            self._values = yaml.load(text, yaml.CSafeLoader)[self.config.subcommand]
            self.config_dump = redacted(self._values, self._given)

    @property
    def settings(self) -> dict[str, Any]:
        """The values that a user may set, by dotted key; empty before parsing."""
        values = {} if self.config is None else flattened(self.config[self.config.subcommand].as_dict())
        values.pop("checkpoint.dirpath", None)  # follows from trainer.default_root_dir
        return values

    @property
    def written_settings(self) -> dict[str, Any]:
        """The same as they are written, without those of loggers."""
        return without_loggers(flattened(self._own(self.config_dump)))

    @property
    def unread(self) -> tuple[str, ...]:
        """The keys under kl that the module does not read."""
        kind = self._module()
        return unread_settings(kind) if isinstance(kind, type) else ()

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the KL plug-in and the checkpoints, set defaults, and link all seeds to `seed_everything`."""
        parser.add_lightning_class_args(KLEstimatorCallback, "kl")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.set_defaults(DEFAULTS)
        parser.link_arguments(
            "trainer.default_root_dir",
            "checkpoint.dirpath",
            compute_fn=lambda root: str((Path(root or "") / schema.CHECKPOINT).parent),
        )
        for key in ("model.init_args.seed", "data.init_args.seed"):
            parser.link_arguments("seed_everything", key)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the given arguments instead of sys.argv, and convert errors to one line."""
        command = self._parser(args[0])
        assert isinstance(command, OneLineParser)
        if not {"-h", "--help"} & {*args}:
            # What --print_config prints may be a template to fill in
            is_template = any(word.startswith("--print_config") for word in args)
            SettingsChecker(command, {"kl.estimator": DEFAULT}).check(
                args[1:], () if is_template else ("model", "data")
            )
        self.config = parser.parse_args(args)
        model = self.config[self.config.subcommand].model if "subcommand" in self.config else None
        if model is not None:
            prefer_given_model(self._words, model.get("init_args", Namespace()))

    def _parse_ckpt_path(self) -> None:
        """Check that the settings agree with the checkpoint's, which Lightning would silently prefer."""
        self.resumed = resumed_run(self.config[self.config.subcommand], self.config.subcommand, self._record)

    def _record(self) -> dict[str, Any]:
        """What a resumed run is compared by."""
        self._dump_config()
        return record(self._own(self._values), self._own(self.config_dump))

    def _own(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings of all sections without keys that follow from others or that nothing reads."""
        config = copy.deepcopy(settings)
        for key in self.unread:
            section, _, name = key.partition(".")
            config[section].pop(name, None)
            if not name:
                del config[section]
        for target in self._parser("fit").links:  # type: ignore[attr-defined]
            section, name = target.split(".")
            (config[section].get("init_args") or config[section]).pop(name, None)
        return config

    def _config_text(self) -> str:
        """The configuration as it is written, as YAML for `--config`."""
        self._dump_config()
        text = yaml.dump(
            self._own(self.config_dump), Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True
        )
        return f"# lightning.pytorch=={L.__version__}\n{text}"

    def _set_seed(self) -> None:
        """Check the range of the seed before Lightning sets it."""
        seed = self.config[self.config.subcommand].seed_everything
        if not isinstance(seed, bool) and not 0 <= seed < MAX_SEED:
            raise ConfigurationError(f"seed_everything: must be from 0 to {MAX_SEED - 1}, got {seed}")
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Check trainer options and the existence of checkpoints before anything is built."""
        config = self.config[self.config.subcommand]
        check_text(self.settings)
        check_named(config.trainer.default_root_dir)
        if self.config.subcommand == "fit" and not config.trainer.fast_dev_run:
            check_training_options(config.trainer.as_dict())
        settings = config.model.get("init_args", Namespace()).as_dict()
        unused = () if config.get("ckpt_path") is None else INITIAL
        check_upstream({key: value for key, value in settings.items() if key not in unused})

    def instantiate_classes(self) -> None:
        """Tell the module which checkpoint it is restored from, before it builds its model."""
        super().instantiate_classes()
        if self.subcommand == "fit" and not is_overridden("train_dataloader", self.datamodule):
            raise ConfigurationError(f"data: {type(self.datamodule).__name__} has no train_dataloader")
        self._get(self.config_init, "kl").chosen = [key for key in self._given if key.startswith("kl")]
        self.model.ckpt_path = self._get(self.config_init, "ckpt_path")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Add the callbacks, loggers and plugins of every run."""
        config = self._get(self.config_init, "trainer")
        self.directory = RunDirectory(config.default_root_dir)
        is_run = self.subcommand == "fit" and not config.fast_dev_run
        config_text = self._config_text() if is_run else ""
        self.recorder = RunRecorder(self.directory, config_text, self._record)
        callbacks: list[Callback] = [self.recorder, PredictionWriter(self.directory.path)]
        callbacks.append(StopBetweenSteps(self.directory.checkpoint if is_run else None))
        # The loggers of a run are added later, so that no choice of loggers removes metrics.csv
        self.tensorboard = config.logger is not False
        prepare_trainer(config, self.model, callbacks, is_run)
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except Exception as error:
            refuse_option(config.as_dict(), self._given, error)
            raise
        check_started(trainer)
        if trainer.num_devices * trainer.num_nodes == 1:
            # Also a run alone may have a group of processes: that of vLLM's engine
            warnings.filterwarnings("ignore", "It is recommended to use `self.log.*sync_dist=True")
        check_strategy(trainer)  # before it starts processes
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the command. A fit locks its directory, and restores it if it fails before its first step."""
        if subcommand != "fit" or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            super()._run_subcommand(subcommand)
            return
        with self.directory:
            try:
                rank_zero_only(self.directory.begin)(self.resumed)  # every process runs this command
                loggers = run_loggers(self.directory.path, self.tensorboard)
                self.trainer.loggers = [*loggers, *self.trainer.loggers]
                tell_loggers(self.trainer.loggers, self.written_settings, self.directory)
                say_before_kill(lambda: error_line(f"{LOST}; {self._resume_hint()}"))
                super()._run_subcommand(subcommand)
            except BaseException as error:
                hint = self._resume_hint()
                if not self.recorder.begun:
                    self.directory.abandon()
                if (ended := interrupted(error, self.settings, hint, self.recorder.begun)) is not None:
                    raise ended from error
                raise

    def _resume_hint(self) -> str:
        """How to continue a run that ends early."""
        if not self.recorder.begun and self.resumed is None:
            return "nothing was trained yet"
        if not self.directory.checkpoint.exists():
            return "no checkpoint was due yet"
        return f"to resume: {self.directory.resume_command}"

    def after_fit(self) -> None:
        """Write the run's summary, and print where the run is and how to use it."""
        evaluate = partial(self.trainer.validate, self.model, datamodule=self.datamodule, verbose=False)
        self.recorder.conclude(self.trainer, evaluate)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            # Lightning writes it to a log that is not shown
            profiler = self.trainer.profiler  # type: ignore[attr-defined]
            if not isinstance(profiler, PassThroughProfiler):
                self.model.print(profiler.summary())
            use = f"to use it elsewhere: {self.directory.export_command}"
            if getattr(self.model, "role", None) == CLASSIFIER:
                use = f"to train with this reward: --model.reward_path {self.directory.checkpoint}"
            self.model.print(f"wrote {self.directory.path} ({self.trainer.global_step} steps); {use}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code; see `main` of `lit_klrb.cli.main`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    quiet()
    try:
        with warn_once_per_line():
            LitCLI(argv)
    except EndedError as ended:
        if not getattr(ended.__cause__, "is_echo", False):  # of the first process, which says it
            print(error_line(ended), file=sys.stderr)
        return ended.code
    except SystemExit as end:
        frame = traceback.extract_tb(end.__traceback__)[-1]
        if {"argparse.py", "jsonargparse"} & {*Path(frame.filename).parts}:  # of --help and the like
            raise
        # Code of the user's, such as a reward, would end the command as if it were done
        called = f"sys.exit({end.code}) was called in {frame.filename}, line {frame.lineno}"
        print(error_line("; ".join([called, *getattr(end, "__notes__", [])])), file=sys.stderr)
        return 1
    return 0
