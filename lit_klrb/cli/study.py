"""`python -m lit_klrb study`: studies of enumerated models, which need no checkpoint and no trainer."""

import json
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from lit_klrb import schema
from lit_klrb.callbacks.recorder import versions
from lit_klrb.cli.parsing import OneLineParser, one_line
from lit_klrb.cli.warned import quiet
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_atomically
from lit_klrb.run.directory import RunDirectory
from lit_klrb.studies.pitfalls import PitfallsStudy


def parser() -> OneLineParser:
    """The parser of the command's options."""
    command = OneLineParser(
        prog="python -m lit_klrb study",
        parser_mode="omegaconf",
        description="Run a study on models so small that every completion is enumerated.",
        epilog="example: python -m lit_klrb study --config configs/pitfalls/tabular.yaml --study.policies 10",
    )
    command.add_argument("--config", action="config", help="a configuration file")
    command.add_argument("--seed_everything", type=int, default=0, help="seed of models and completions")
    command.add_argument("--study", type=PitfallsStudy, required=True, help="the study and its settings")
    command.add_argument(
        "--trainer.default_root_dir", type=str, default="runs/unnamed", help="the run directory"
    )
    return command


def parse(argv: Sequence[str]) -> tuple[OneLineParser, Namespace, PitfallsStudy]:
    """The parser, the settings and the study of a command line.

    Raises:
        ConfigurationError: If an option is not allowed; one line.
    """
    options = parser()
    try:
        config = options.parse_args(list(argv))
        return options, config, options.instantiate(config).study
    except ConfigurationError as error:
        raise ConfigurationError(one_line(str(error), options.known_keys())) from None


def main(argv: Sequence[str]) -> None:
    """Run a study and write the files of a run: config.yaml, studies/NAME.json, summary.json.

    Args:
        argv: The command line after `study`.

    Raises:
        ConfigurationError: If an option is not allowed.
    """
    quiet()
    options, config, study = parse(argv)
    with RunDirectory(config.trainer.default_root_dir) as directory:
        directory.begin()
        root: Path = directory.path
        try:
            write_atomically(root / schema.CONFIG, options.dump(config, skip_none=False))
            artifact = study.measure(config.seed_everything)
        except BaseException:  # Ctrl-C too: nothing is kept of a study that did not end
            directory.abandon()
            raise
        write_atomically(root / schema.STUDIES / f"{study.name}.json", json.dumps(artifact) + "\n")
        summary = {"state": schema.DONE, "final": {}, "versions": versions()}
        write_atomically(root / schema.SUMMARY, json.dumps(summary, indent=2) + "\n")
    print(f"wrote {root / schema.STUDIES / study.name}.json")
