"""`python -m lit_klrb`: LightningCLI with this project's defaults, and one clear line for wrong input."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

import lit_klrb.data.modules
import lit_klrb.modules
import lit_klrb.studies  # noqa: F401  their classes are what short names in a config resolve to
from lit_klrb import schema
from lit_klrb.callbacks import (
    DivergedError,
    KLEstimatorCallback,
    PredictionWriter,
    RunCheckpoint,
    RunProgressBar,
    RunRecorder,
)
from lit_klrb.cli.mistakes import EndedError, ending_of, flattened
from lit_klrb.cli.parsing import OneLineParser, one_line
from lit_klrb.errors import ConfigurationError, error_line
from lit_klrb.models.loading import silence
from lit_klrb.run.directory import set_aside
from lit_klrb.run.loggers import default_loggers
from lit_klrb.run.options import check_training_options

# Where a module says what it starts from.
PATHS = ("policy_path", "reference_path", "classifier_path", "tokenizer_path", "reward_path")
# Of these, what a checkpoint given by ckpt_path has in itself.
INITIAL = ("policy_path", "classifier_path", "tokenizer_path")


# NumPy's generator takes no larger seeds.
MAX_SEED = 2**32


class LitCLI(LightningCLI):
    """Modules and data by class name, one run directory, the KL plug-in under `kl`."""

    def __init__(self, args: Sequence[str]) -> None:
        self._command = args[0] if args else ""
        self.config: Any = None
        try:
            super().__init__(
                model_class=L.LightningModule,
                datamodule_class=L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=None,
                parser_class=OneLineParser,
                parser_kwargs={"parser_mode": "omegaconf", "prog": "python -m lit_klrb"},
                seed_everything_default=0,
                auto_configure_optimizers=False,
                args=list(args),
            )
        except Exception as error:
            ending = ending_of(error, self.settings)
            if ending is None:
                raise
            raise EndedError(*ending) from error

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The command that is run: each further one costs its own parser."""
        every = LightningCLI.subcommands()
        return {self._command: every[self._command]} if self._command in every else every

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration's values by dotted key; empty as long as it is not parsed."""
        return {} if self.config is None else flattened(self.config[self.config.subcommand].as_dict())

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The KL plug-in, the checkpoint's rhythm, and one seed for everything."""
        parser.add_lightning_class_args(KLEstimatorCallback, "kl")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "kl.estimator": {"class_path": "lit_klrb.estimators.RaoBlackwell"},
                "checkpoint.filename": Path(schema.CHECKPOINT).stem,
                "checkpoint.every_n_train_steps": 100,
                "checkpoint.enable_version_counter": False,
                "trainer.default_root_dir": "runs/unnamed",
                "trainer.log_every_n_steps": 1,
                "trainer.enable_model_summary": False,
                "trainer.num_sanity_val_steps": -1,
                # Batches depend on (seed, step, rank) already; every process evaluates on all prompts.
                "trainer.use_distributed_sampler": False,
            }
        )
        parser.link_arguments(
            "trainer.default_root_dir",
            "checkpoint.dirpath",
            compute_fn=lambda root: str((Path(root) / schema.CHECKPOINT).parent),
        )
        for key in ("model.init_args.seed", "data.init_args.seed"):
            parser.link_arguments("seed_everything", key)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments given, whatever stands in sys.argv; an error becomes one line."""
        try:
            self.config = parser.parse_args(args)
        except ConfigurationError as error:
            command = self._parser(args[0])
            assert isinstance(command, OneLineParser)
            raise ConfigurationError(one_line(str(error), command.known_keys())) from None

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the checkpoint's settings win over the command line's; here they must agree."""
        config = self.config[self.config.subcommand]
        path = config.get("ckpt_path")
        if path is None:
            return
        if not Path(path).is_file():
            raise ConfigurationError(f"ckpt_path: {path} does not exist")
        if self.config.subcommand == "fit":
            check_same_settings(path, config.model)

    def _set_seed(self) -> None:
        """Lightning's own, for seeds that all random generators take."""
        seed = self.config[self.config.subcommand].seed_everything
        if not isinstance(seed, bool) and not 0 <= seed < MAX_SEED:
            raise ConfigurationError(f"seed_everything: must be from 0 to {MAX_SEED - 1}, got {seed}")
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Refuse what would train nothing, and missing checkpoints, before anything is built."""
        config = self.config[self.config.subcommand]
        if self.config.subcommand == "fit" and not config.trainer.fast_dev_run:
            check_training_options(config.trainer.as_dict())
        settings = config.model.get("init_args", Namespace()).as_dict()
        unused = () if config.get("ckpt_path") is None else INITIAL
        check_upstream({key: value for key, value in settings.items() if key not in unused})

    def instantiate_classes(self) -> None:
        """Tell the module which checkpoint it is restored from, before it builds its model."""
        super().instantiate_classes()
        self.model.ckpt_path = self._get(self.config_init, "ckpt_path")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Add what every run has: its loggers, its record, its predictions."""
        config = self._get(self.config_init, "trainer")
        check_accelerator(config.accelerator)
        root = Path(config.default_root_dir)
        if self.subcommand == "fit" and not config.fast_dev_run:
            self._begin(root)
        if config.logger is None:
            config.logger = default_loggers(root) if self.subcommand == "fit" else False
        given = list(config.callbacks or [])
        self.recorder = RunRecorder(root)
        own: list[Callback] = [self.recorder, PredictionWriter(root)]
        if config.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in given):
            own.append(RunProgressBar())
        config.callbacks = [*given, *own]
        return super().instantiate_trainer(**kwargs)

    @rank_zero_only  # every process of a run starts with this command
    def _begin(self, root: Path) -> None:
        if self._get(self.config_init, "ckpt_path") is None:
            set_aside(root)
        root.mkdir(parents=True, exist_ok=True)
        self._parser("fit").save(
            self.config["fit"], root / schema.CONFIG, skip_none=False, overwrite=True, multifile=False
        )

    def after_fit(self) -> None:
        """Write the run's summary."""
        self.recorder.conclude(
            self.trainer, lambda: self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        )


def check_accelerator(name: Any) -> None:
    """Refuse an accelerator that this machine does not have.

    Raises:
        ConfigurationError: With those it has.
    """
    known = AcceleratorRegistry.items()
    available = ["auto", *sorted(name for name, entry in known if entry["accelerator"].is_available())]
    if {"cuda", "mps"} & {*available}:
        available.append("gpu")
    if isinstance(name, str) and name not in available:
        raise ConfigurationError(
            f"{name!r} is not there; this machine has {', '.join(available)}", key="accelerator"
        )


def check_same_settings(ckpt_path: str, model: Any) -> None:
    """Resuming continues the very same run; anything else is a warm start.

    Raises:
        ConfigurationError: If the checkpoint was trained with other settings, naming the first that differs.
    """
    saved = torch.load(ckpt_path, map_location="cpu", weights_only=True).get("hyper_parameters", {})
    wanted = {"_class_path": model.class_path, **model.init_args.as_dict()}
    for key in sorted(saved.keys() & wanted.keys()):
        if saved[key] != wanted[key]:
            raise ConfigurationError(
                f"ckpt_path: {ckpt_path} was trained with {key}={saved[key]}, not {wanted[key]}; ckpt_path "
                "resumes the very same run, to start another from its policy use model.init_args.policy_path"
            )


def check_upstream(settings: dict[str, Any]) -> None:
    """See that the checkpoints a module starts from are there.

    Raises:
        ConfigurationError: Naming the key, the path, and the command that makes it if a config beside the
            default ones does.
    """
    paths = [(key, path) for key in PATHS for path in paths_of(settings.get(key))]
    for key, path in paths:
        if not path.endswith(".ckpt") or Path(path).exists():
            continue
        maker = config_that_makes(Path(path))
        how = f"make it with: python -m lit_klrb fit --config {maker}" if maker else "name one that does"
        raise ConfigurationError(f"{path} does not exist; {how}", key=key)


def paths_of(value: str | dict[str, float] | None) -> list[str]:
    """The paths a setting names: one, none, or several with their weights."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def config_that_makes(checkpoint: Path) -> Path | None:
    """The file under configs/ whose run directory the checkpoint lies in."""
    pattern = re.compile(r"^\s*default_root_dir:\s*(\S+)", re.MULTILINE)
    for config in sorted(Path("configs").rglob("*.yaml")):
        found = pattern.search(config.read_text("utf-8"))
        if found and Path(found[1]) / schema.CHECKPOINT == checkpoint:
            return config
    return None


def quiet() -> None:
    """Silence what is no news to the user: hardware banners, and hints against choices made on purpose."""
    # Lightning calls methods of jsonargparse by their older names.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    silence()
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for hint in (
        ".*does not have many workers.*",  # the model is the bottleneck; loaders run in the main process
        ".*module\\(s\\) in eval mode.*",  # the reference, always; the policy where dropout is not wanted
        ".*dirpath has changed.*",  # a run directory may be moved, or its checkpoint evaluated elsewhere
        ".*exists and is not empty.*",  # a resumed run writes where it wrote before
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # Lightning's own use of torch
    ):
        warnings.filterwarnings("ignore", hint)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command line after the program's name.

    Returns:
        The exit code: 0 done, 2 wrong usage or configuration (one line says what), 1 anything else.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    quiet()
    try:
        LitCLI(argv)
    except DivergedError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except EndedError as ended:
        print(error_line(ended.line), file=sys.stderr)
        return ended.code
    return 0
