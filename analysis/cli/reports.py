"""The commands that read results: report, publish, verify, import and compare."""

import argparse
import sys
from typing import TYPE_CHECKING

from analysis.design.imported import import_runs
from analysis.results import layout
from analysis.results.consistency import unstated
from analysis.results.locked import LockedPlan
from lit_klrb.errors import printable
from lit_klrb.terminal import say_loading

if TYPE_CHECKING:
    from analysis.report.verify import Verification

# Exit code of `verify` if everything compared agrees but something could not be compared.
NOT_ALL_COMPARED = 3


def report_command(arguments: argparse.Namespace) -> int:
    """Write the report of a sweep and print its answer, or the page of a single run."""
    say_loading(f"reading {arguments.runs}")
    # Imported here as the libraries for figures are slow to import
    from analysis.report.answer import sentence_of
    from analysis.report.assessment import load_assessment
    from analysis.report.build import write
    from analysis.report.run import build_run, is_run
    from analysis.report.sections import added_sections

    if is_run(arguments.runs):
        print(build_run(arguments.runs, arguments.output))
        return 0
    assessment = load_assessment(arguments.runs)
    page = write(assessment, arguments.output, added_sections())
    print(printable(sentence_of(assessment)), page, sep="\n")
    return 0


def publish_command(arguments: argparse.Namespace) -> int:
    """Copy a sweep for publication and write its report there."""
    say_loading(f"reading {arguments.runs}")
    from analysis.report.publish import publish

    print(publish(arguments.runs, arguments.output))
    return 0


def import_command(arguments: argparse.Namespace) -> int:
    """Write runs of other software as a sweep, and say what their page will ask for."""
    output = import_runs(arguments.source, arguments.config, arguments.output)
    for line in unstated(LockedPlan.read(output / layout.PLAN)):
        print(line, file=sys.stderr)
    print(output)
    return 0


def compare_command(arguments: argparse.Namespace) -> int:
    """Print two sweeps side by side."""
    say_loading(f"reading {arguments.first} and {arguments.second}")
    from analysis.report.side_by_side import side_by_side

    print("\n".join(map(printable, side_by_side(arguments.first, arguments.second, arguments.output))))
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    """Recompute a report, and print where it differs."""
    say_loading(f"recomputing {arguments.report}")
    from analysis.report.sections import added_sections
    from analysis.report.verify import verify

    return print_verification(verify(arguments.report, added_sections()))


def print_verification(found: "Verification") -> int:
    """Print what `verify` found, and return the exit code."""
    sweep, locked = found.sweep, found.sweep.locked
    print(f"data: {sweep.directory}, {len(sweep.runs)} results")
    print(f"plan: {_plan_state(locked)}")
    for problem in sweep.problems:
        print(f"problem: {printable(problem.text)}")
    for line in found.differences:
        print(f"differs: {printable(line)}")
    for line in found.not_compared:
        print(f"not compared: {printable(line)}")
    if found.differences:
        return 1
    if found.not_compared:
        print("everything that was compared agrees with the results")
        return NOT_ALL_COMPARED
    print("every number agrees with the results")
    return 0


def _plan_state(locked: LockedPlan) -> str:
    state = "recomputed" if locked.recomputed else "does NOT recompute"
    changed = "; changed after results" if locked.changed_after_results else ""
    return f"{locked.hash}, {state}{changed}"
