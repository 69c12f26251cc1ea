"""`python -m replication`: studies, the ledger of claims, reports with studies of enumerated models, figures.

`fit` and `check` are those of `lit_klrb`, for plans whose `module` is this package.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from analysis.cli.main import Parser, print_verification, run
from analysis.report.assessment import load_assessment
from analysis.report.build import build
from analysis.report.sections.tradeoff import tradeoff
from analysis.report.verify import verify
from analysis.results.layout import NUMBERS
from lit_klrb.cli import main as runs
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_atomically
from replication import credit, pays, results_page
from replication.audit import audit
from replication.claims.ledger import is_ledger, verify_ledger, write_ledger
from replication.publish import publish
from replication.sections import SECTIONS

LEDGER = Path(__file__).parent / "ledger"
RESULTS = Path(__file__).parent / "results"


def claims_command(arguments: argparse.Namespace) -> int:
    """Write the ledger of claims, and the tables of docs/results.md."""
    for claim, ruling in write_ledger(arguments.directory).items():
        print(f"{ruling.verdict.value:18}{claim.key}")
    print(arguments.directory)
    results_page.write()
    return 0


def report_command(arguments: argparse.Namespace) -> int:
    """Write the report of a sweep with the sections on enumerated models."""
    print(build(arguments.runs, arguments.output, SECTIONS))
    return 0


def publish_command(arguments: argparse.Namespace) -> int:
    """Copy plan, results and report of a sweep."""
    print(publish(arguments.runs, arguments.output))
    return 0


def rebuild_command(arguments: argparse.Namespace) -> int:
    """Write the reports of published sweeps again, as after a change of the statistics."""
    for numbers in _published(arguments.path):
        print(build(numbers.parent, added=SECTIONS), flush=True)
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    """Recompute the ledger, a report, or all reports below a directory, and print where they differ."""
    if is_ledger(arguments.path):
        differences = verify_ledger(arguments.path)
        for line in differences:
            print(f"differs: {line}")
        if not differences:
            print("every page agrees with the artifacts")
        return int(bool(differences))
    if (arguments.path / NUMBERS).exists() or not arguments.path.is_dir():
        return print_verification(verify(arguments.path, SECTIONS))
    codes = {}
    for numbers in _published(arguments.path):
        codes[numbers.parent] = print_verification(verify(numbers, SECTIONS))
    for folder, code in codes.items():
        print(f"{code} {folder}")
    return 1 if 1 in codes.values() else max(codes.values())


def _published(folder: Path) -> list[Path]:
    """The numbers of all reports below a directory."""
    found = sorted(folder.rglob(NUMBERS))
    if not found:
        raise ConfigurationError(f"{folder}: there is no {NUMBERS} in or below it")
    return found


def study_command(arguments: argparse.Namespace) -> int:
    """Run a study, or answer what a sweep asks about studies."""
    # Imported here as the libraries for models are slow to import
    from replication import study

    if arguments.words is None:
        study.check_requests()
    else:
        study.main(arguments.words)
    return 0


def audit_command(arguments: argparse.Namespace) -> int:
    """Print what published points or a share support."""
    print("\n".join(audit(arguments.points, arguments.share, arguments.control, arguments.match)))
    return 0


def map_command(arguments: argparse.Namespace) -> int:
    """Draw the map of credits in distillation."""
    write_atomically(credit.FIGURE, credit.draw_map() + "\n")
    print(credit.FIGURE)
    return 0


def pays_command(arguments: argparse.Namespace) -> int:
    """Draw the map of when less noise pays, and print its numbers."""
    toy, tasks = pays.read_toy(), pays.read_tasks()
    write_atomically(pays.FIGURE, pays.draw_pays(toy, tasks) + "\n")
    print("\n".join(pays.table(toy, tasks)))
    print(pays.FIGURE)
    return 0


def frontier_command(arguments: argparse.Namespace) -> int:
    """Draw reward against KL of a sweep, beside its page."""
    path = arguments.path / "frontier.svg"
    write_atomically(path, frontier(arguments.path) + "\n")
    print(path)
    return 0


def frontier(folder: Path) -> str:
    """Reward against KL of a sweep's runs, as its report shows them."""
    section = tradeoff(load_assessment(folder))
    if section is None or not section.figures:
        raise ConfigurationError(f"{folder}: its report has no figure of reward and KL")
    return section.figures[0].svg


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m replication", description=__doc__)
    names = "study|claims|report|publish|rebuild|verify|audit|map|pays|frontier"
    commands = parser.add_subparsers(required=True, metavar=names)
    # Words that begin with a dash are those of the study
    own: Any = {"prefix_chars": "\0", "add_help": False}
    studied = commands.add_parser("study", help="measure models without training", **own)
    studied.set_defaults(run=study_command)
    studied.add_argument("words", nargs="*")
    commands.add_parser("check").set_defaults(run=study_command, words=None)
    claims = commands.add_parser("claims", help="write the ledger of claims from its artifacts")
    claims.set_defaults(run=claims_command)
    claims.add_argument(
        "directory", nargs="?", type=Path, default=LEDGER, metavar="DIR", help="its directory"
    )
    report = commands.add_parser("report", help="write the report of a sweep, with its enumerated models")
    report.set_defaults(run=report_command)
    report.add_argument("runs", type=Path, metavar="RUNS_DIR", help="a sweep's directory")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="the file to write (default: RUNS_DIR/report.html)"
    )
    published = commands.add_parser("publish", help="copy plan, results in one file and report, to share")
    published.set_defaults(run=publish_command)
    published.add_argument("runs", type=Path, metavar="RUNS_DIR", help="a sweep's directory")
    published.add_argument("--output", required=True, type=Path, metavar="DIR", help="the directory to write")
    rebuilt = commands.add_parser("rebuild", help="write the reports of published sweeps again")
    rebuilt.set_defaults(run=rebuild_command)
    rebuilt.add_argument(
        "path", nargs="?", type=Path, default=RESULTS, metavar="DIR", help="a directory of such reports"
    )
    verified = commands.add_parser("verify", help="recompute the ledger, or reports")
    verified.set_defaults(run=verify_command)
    verified.add_argument("path", nargs="?", type=Path, default=LEDGER, metavar="DIR")
    audited = commands.add_parser("audit", help="check what published points or a frontier share support")
    audited.set_defaults(run=audit_command)
    audited.add_argument(
        "points",
        nargs="?",
        type=Path,
        metavar="CSV",
        help="columns method, kl, reward, and columns that match runs in pairs",
    )
    audited.add_argument("--share", metavar="K/N", help="K of N frontier points, if no points are published")
    audited.add_argument("--control", metavar="METHOD", help="the method that the others are compared with")
    audited.add_argument(
        "--match",
        metavar="COLUMN,...",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        help="the columns that match runs in pairs (default: all but method, kl and reward)",
    )
    drawn = commands.add_parser("map", help="draw docs/credit.svg, the credits in distillation by study")
    drawn.set_defaults(run=map_command)
    drawn = commands.add_parser("pays", help="draw docs/pays.svg, when less noise pays, and its numbers")
    drawn.set_defaults(run=pays_command)
    drawn = commands.add_parser("frontier", help="draw reward against KL of a sweep beside its page")
    drawn.set_defaults(run=frontier_command)
    drawn.add_argument("path", type=Path, metavar="DIR", help="the sweep's directory")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The arguments; those of the process by default.
    """
    words = sys.argv[1:] if argv is None else argv
    return runs.main(words) if words[:1] == ["fit"] else run(_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
