"""The command line of `lit-klrb`, and the commands that read results."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lit_klrb import __version__, schema
from lit_klrb.errors import EXHAUSTED, ConfigurationError, DamagedFileError, error_line, printable
from lit_klrb.stops import Stopped, Stops
from lit_klrb.terminal import print_lines, print_table, say_loading

if TYPE_CHECKING:
    from analysis.report.verify import Verification

# Exit code of `verify` if everything compared agrees but something could not be compared.
NOT_ALL_COMPARED = 3


def report_command(arguments: argparse.Namespace) -> int:
    """Write the report of a sweep and print its answer, or the page of a single run."""
    say_loading(f"reading {arguments.runs}")
    # Imported here as the libraries for figures are slow to import
    from analysis.report.assessment import load_assessment, sentence_of
    from analysis.report.build import write
    from analysis.report.power import warnings
    from analysis.report.run import build_run
    from analysis.report.sections import added_sections
    from analysis.report.verdict_table import write_table

    if (arguments.runs / schema.RUN).is_file():
        if arguments.table is not None:
            raise ConfigurationError(
                f"--table {arguments.table}: {arguments.runs} is a run and has no verdict"
            )
        print(build_run(arguments.runs, arguments.output))
        return 0
    assessment = load_assessment(arguments.runs)
    if arguments.table is not None:
        write_table(assessment, arguments.table)
    page = write(assessment, arguments.output, added_sections())
    print_lines(printable(sentence_of(assessment)))
    print(page)
    for line in warnings(assessment.sweep):
        print_lines(f"warning: {line}", stream=sys.stderr)
    return 0


def import_command(arguments: argparse.Namespace) -> int:
    """Write runs of other software as a sweep, and say what their page will ask for."""
    from analysis.checks.plans import unstated
    from analysis.imports.imported import import_runs
    from analysis.results import layout
    from analysis.results.locked import LockedPlan

    import_runs(arguments.source, arguments.config, arguments.output)
    for line in unstated(LockedPlan.read(arguments.output / layout.PLAN)):
        print_lines(line, stream=sys.stderr)
    print(arguments.output)
    return 0


def compare_command(arguments: argparse.Namespace) -> int:
    """Print two sweeps side by side."""
    say_loading(f"reading {arguments.first} and {arguments.second}")
    from analysis.report.side_by_side import side_by_side

    notes, tables = side_by_side(arguments.first, arguments.second)
    print_lines(*map(printable, notes))
    for table in tables:
        print_lines(f"\n{table.caption}")
        print_table(table.header, table.cells)
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    """Recompute a report, and print where it differs."""
    say_loading(f"recomputing {arguments.report}")
    from analysis.report.sections import added_sections
    from analysis.report.verify import verify

    return print_verification(verify(arguments.report, added_sections()), arguments.json)


def print_verification(verification: "Verification", as_json: bool = False) -> int:
    """Print what `verify` found, and return the exit code."""
    sweep, locked = verification.sweep, verification.sweep.locked
    if as_json:
        plan = {key: getattr(locked, key) for key in ("hash", "recomputed", "changed_after_results")}
        answer = {
            "data": str(sweep.directory),
            "results": len(sweep.runs),
            "plan": plan,
            "problems": [problem.text for problem in sweep.problems],
            "differences": verification.differences,
            "not_compared": verification.not_compared,
        }
        print(json.dumps(answer, indent=2))
        return 1 if verification.differences else NOT_ALL_COMPARED if verification.not_compared else 0
    print(f"data: {sweep.directory}, {len(sweep.runs)} results")
    state = "recomputed" if locked.recomputed else "does NOT recompute"
    changed = "; changed after results" if locked.changed_after_results else ""
    print(f"plan: {locked.hash}, {state}{changed}")
    for problem in sweep.problems:
        print_lines(f"problem: {printable(problem.text)}")
    for line in verification.differences:
        print(f"differs: {printable(line)}")
    for line in verification.not_compared:
        print(f"not compared: {printable(line)}")
    if verification.differences:
        return 1
    if verification.not_compared:
        print("everything that was compared agrees with the results")
        return NOT_ALL_COMPARED
    print("every number agrees with the results")
    return 0


_DESCRIPTION = """\
Plans, runs and analyses sweeps over {arm x beta x replicate}.

  lit-klrb plan   --config configs/demo/sweep.yaml   list the cells, their time and the power
                  --pilot runs/demo                  with the variances of an earlier sweep
  lit-klrb sweep  --config configs/demo/sweep.yaml   run what is missing; can be killed and repeated
  lit-klrb report runs/demo                          write an HTML file, and results.json beside it
  lit-klrb verify runs/demo                          recompute every number of the report
  lit-klrb compare runs/one runs/other               compare two sweeps, unpaired

Exit codes: 0 done; 2 wrong usage or configuration; 3 a report agrees as far as it could be compared;
130 and 143 stopped by Ctrl-C or SIGTERM; 1 anything else.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `ConfigurationError`."""

    def error(self, message: str) -> NoReturn:
        """Raise an error of usage instead of exiting."""
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run(_parser, argv)


def run(parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None = None) -> int:
    """Run the command `run` of a parser's arguments, with one line and an exit code for every error.

    Args:
        parser: Makes the parser; what it imports, for a second, can be stopped, too.
        argv: The arguments; those of the process by default.
    """
    try:
        with Stops():
            arguments = parser().parse_args(argv)
            arguments.command = shlex.join(["lit-klrb", *(argv or sys.argv[1:])])
            code: int = arguments.run(arguments)
    except (ConfigurationError, DamagedFileError) as error:
        print(error_line(error), file=sys.stderr)
        return 2
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else error
        print(error_line(named), file=sys.stderr)
        return 1 if error.errno in EXHAUSTED else 2
    except Stopped as stop:
        print("; ".join([str(stop), *getattr(stop, "__notes__", [])]), file=sys.stderr)
        return stop.exit_code
    return code


class _Schema(argparse.Action):
    """Prints the JSON schema of plans, which needs no plan."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit, as `--version` does."""
        from analysis.design.plan_file import json_schema

        print(json.dumps(json_schema(), indent=2))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    from analysis.cli.sweep import plan_command, sweep_command
    from analysis.sweep import STORAGE

    parser = Parser(
        prog="lit-klrb",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lit_klrb {__version__}")
    commands = parser.add_subparsers(required=True, metavar="plan|sweep|report|verify|import|compare")

    plan = commands.add_parser("plan", help="say what a sweep compares, its cells, time and power")
    plan.set_defaults(run=plan_command)
    plan.add_argument("--schema", action=_Schema, nargs=0, help="print the JSON schema of plans, and exit")
    plan.add_argument("--cells", action="store_true", help="list all cells, with ids, states and seeds")
    plan.add_argument(
        "--pilot",
        type=Path,
        metavar="RUNS_DIR",
        help="an earlier sweep with whose variances power is simulated (default: stated assumptions)",
    )
    sweep = commands.add_parser("sweep", help="run what is missing; safe to kill and to repeat")
    sweep.set_defaults(run=sweep_command)
    for command in (plan, sweep):
        command.add_argument(
            "--config", required=True, type=Path, metavar="FILE", help="the plan: configs/demo/sweep.yaml"
        )
        command.add_argument(
            "--workers", type=_positive, metavar="N", help="cells run in parallel (default: one per core)"
        )
    sweep.add_argument(
        "--minutes",
        type=_number_of("minutes"),
        metavar="N",
        help="stop after this time as after Ctrl-C, with exit code 1 (default: when all is done)",
    )
    sweep.add_argument(
        "--storage",
        type=_number_of("GB"),
        default=STORAGE,
        metavar="GB",
        help="remove checkpoints and metrics of finished cells beyond this, oldest first (default: 10)",
    )
    sweep.add_argument(
        "--launcher",
        default="local",
        metavar="NAME",
        help="how cells are run: local (default), ray, or slurm",
    )
    sweep.add_argument(
        "--slurm", default="", metavar="OPTIONS", help="of sbatch, for each cell: '--partition=gpu --gpus=1'"
    )
    sweep.add_argument(
        "--address", metavar="HOST:PORT", help="a running Ray cluster, or auto (default: start one here)"
    )

    report = commands.add_parser("report", help="write a self-contained HTML file and results.json")
    report.set_defaults(run=report_command)
    report.add_argument(
        "runs", type=Path, metavar="RUNS_DIR", help="a sweep's directory, such as runs/demo, or a run's"
    )
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="the file to write (default: RUNS_DIR/report.html)"
    )

    report.add_argument(
        "--table", type=Path, metavar="FILE", help="also write the verdicts, as FILE.csv or as FILE.tex"
    )

    imported = commands.add_parser("import", help="import runs of other software as a sweep")
    imported.set_defaults(run=import_command)
    imported.add_argument(
        "source", type=Path, metavar="FILE", help="a log (.csv, .jsonl, .json) or a folder of logs"
    )
    imported.add_argument(
        "--config", required=True, type=Path, metavar="MAPPING", help="the meaning of the columns"
    )
    imported.add_argument("--output", required=True, type=Path, metavar="DIR", help="the directory to write")

    compare = commands.add_parser("compare", help="compare two sweeps, unpaired")
    compare.set_defaults(run=compare_command)
    compare.add_argument("first", type=Path, metavar="DIR", help="a sweep's directory")
    compare.add_argument("second", type=Path, metavar="DIR", help="the sweep to compare with it")

    verify = commands.add_parser("verify", help="recompute every number of a report from its results")
    verify.set_defaults(run=verify_command)
    verify.add_argument("report", type=Path, metavar="REPORT_OR_DIR", help="a report or its directory")
    for command in (plan, verify):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _number_of(unit: str) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number of {unit} > 0 is expected")
        return number

    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; an integer >= 1 is expected")
    return int(text)
