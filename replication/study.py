"""`python -m replication study`: measurements of checkpoints, without training."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import replication.studies  # noqa: F401  their classes are what short names in a config resolve to
from lit_klrb import schema
from lit_klrb.cli.check import check
from lit_klrb.cli.error_translation import ending_of, quiet
from lit_klrb.cli.settings_checker import OneLineParser, SettingsChecker
from lit_klrb.errors import check_at_least
from lit_klrb.files import write_atomically
from lit_klrb.run.directory import RunDirectory, check_named, run_id
from lit_klrb.run.machine import versions
from replication.studies.base import Study


def parser() -> OneLineParser:
    """The parser of the command's options."""
    command = OneLineParser(
        prog="python -m replication study",
        parser_mode="omegaconf",
        description="Measure estimators on checkpoints. A stopped study can be resumed.",
        epilog="example: python -m replication study --config replication/configs/studies/estimation.yaml",
    )
    command.add_argument("--config", action="config", help="a configuration file")
    command.add_argument("--seed_everything", type=int, default=0, help="seed of all random numbers")
    command.add_argument("--study", type=Study, required=True, help="the study and its settings")
    command.add_argument(
        "--trainer.default_root_dir", type=str, default="runs/unnamed", help="the run directory"
    )
    return command


def parse(argv: Sequence[str]) -> tuple[OneLineParser, Namespace, Study]:
    """The parser, the settings and the study of a command line."""
    options = parser()
    if not {"-h", "--help"} & {*argv}:
        SettingsChecker(options, {}).check(argv, required=("study",))
    config = options.parse_args(list(argv))
    check_at_least(0, seed_everything=config.seed_everything)
    return options, config, options.instantiate(config).study


def main(argv: Sequence[str]) -> None:
    """Run a study and write the files of a run: config.yaml, studies/NAME.json, summary.json.

    A stopped study goes on in its directory if it is started again with the same configuration.
    """
    quiet()
    options, config, study = parse(argv)
    text = options.dump(config, skip_none=False)
    check_named(config.trainer.default_root_dir)
    with RunDirectory(config.trainer.default_root_dir) as directory:
        root: Path = directory.path
        written = root / schema.CONFIG
        same = written.is_file() and written.read_bytes() == text.encode()
        stopped = same and not (root / schema.SUMMARY).exists()
        directory.begin(run_id(root) if stopped else None)
        # The results of finished parts, until the artifact is written
        parts = root / schema.STUDIES / study.name
        try:
            write_atomically(root / schema.CONFIG, text)
            runs = study.parts(config.seed_everything)
            artifact = study.artifact({name: _result(parts, name, run) for name, run in runs.items()})
        except BaseException:  # Ctrl-C too
            if not any(parts.glob("*.json")):
                directory.abandon()
            raise
        write_atomically(root / schema.STUDIES / f"{study.name}.json", json.dumps(artifact) + "\n")
        shutil.rmtree(parts, ignore_errors=True)
        summary = {"state": schema.DONE, "final": {}, "versions": versions()}
        write_atomically(root / schema.SUMMARY, json.dumps(summary, indent=2) + "\n")
    print(f"wrote {root / schema.STUDIES / study.name}.json")


def _result(folder: Path, name: str, run: Callable[[], Any]) -> Any:
    """The result of a part, which is run if it has not finished before."""
    path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        print(name, flush=True)
        write_atomically(path, json.dumps(run()) + "\n")
    return json.loads(path.read_bytes())


def check_requests() -> None:
    """Answer command lines on standard input as `lit-klrb check` does, those of studies too."""
    quiet()
    requests: list[list[str]] = json.load(sys.stdin)
    made: dict[Path, Any] = {}
    with redirect_stdout(StringIO()) as said:  # standard output is for the answers
        answers = [_checked(line[1:]) if line[0] == "study" else check(line, made) for line in requests]
    sys.stderr.write(said.getvalue())
    json.dump(answers, sys.stdout)


def _checked(argv: Sequence[str]) -> dict[str, Any]:
    try:
        parse(argv)
    except Exception as error:
        return {"error": str(ending_of(error, {}) or f"{type(error).__name__}: {error}")}
    return {"module": None, "estimator": None, "evaluation": {}}
