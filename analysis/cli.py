"""The commands of `python -m analysis`."""

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from analysis.design import expand, read_plan, smallest_p
from analysis.design.imported import import_runs
from analysis.results import Cell, DamagedFileError, Plan
from analysis.results.arm import Arm
from analysis.results.locked import LockedPlan
from analysis.results.records import read_result
from analysis.sweep import (
    Clock,
    Coordinator,
    Launcher,
    LocalLauncher,
    Locked,
    Outcome,
    Progress,
    State,
    Store,
    duration,
    lock,
    survey,
)
from lit_klrb.errors import EXHAUSTED, ConfigurationError, error_line
from lit_klrb.stops import Stopped, Stops

# Assumed time of cells of a stage without a finished cell.
ASSUMED_SECONDS = 60.0
# Descriptions of the outcomes that can decide.
_DECIDES = {
    "objective": "J = reward - beta * KL at the run's own beta, each beta counting the same",
    "kl": "the KL alone, each beta counting the same",
}
# Exit code of `verify` if everything compared agrees but something could not be compared.
NOT_ALL_COMPARED = 3

_DESCRIPTION = """\
Plans, runs and analyses sweeps over {arm x beta x replicate}.

  python -m analysis plan   --config configs/demo/sweep.yaml   list the cells, their time and the power
                            --pilot runs/demo                  with the variances of an earlier sweep
  python -m analysis sweep  --config configs/demo/sweep.yaml   run what is missing; can be killed and repeated
  python -m analysis report runs/demo                          write an HTML file, and results.json beside it
  python -m analysis verify runs/demo                          recompute every number of the report
  python -m analysis compare runs/one runs/other               compare two sweeps, unpaired
  python -m analysis audit  --share 7/9                        check what a published frontier share supports

Exit codes: 0 done; 2 wrong usage or configuration; 3 a report agrees as far as it could be compared;
130 and 143 stopped by Ctrl-C or SIGTERM; 1 anything else.
"""
_STOPPING = "stopping: running cells save after this step; once more to stop at once, without saving"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The arguments; those of the process by default.
    """
    try:
        with Stops():
            arguments = _parser().parse_args(argv)
            arguments.command = shlex.join(["python", "-m", "analysis", *(argv or sys.argv[1:])])
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m analysis",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="plan|sweep|report|verify|import|compare|audit")

    plan = commands.add_parser("plan", help="list the cells of a sweep, their time and the power")
    plan.set_defaults(run=_plan)
    plan.add_argument(
        "--pilot",
        type=Path,
        metavar="RUNS_DIR",
        help="an earlier sweep with whose variances power is simulated (default: stated assumptions)",
    )
    sweep = commands.add_parser("sweep", help="run what is missing; safe to kill and to repeat")
    sweep.set_defaults(run=_sweep)
    for command in (plan, sweep):
        command.add_argument(
            "--config", required=True, type=Path, metavar="FILE", help="the plan: configs/demo/sweep.yaml"
        )
        command.add_argument(
            "--workers", type=_positive, metavar="N", help="cells run in parallel (default: one per core)"
        )

    sweep.add_argument(
        "--launcher", choices=["local", "ray"], default="local", help="how cells are run (default: local)"
    )
    sweep.add_argument(
        "--address", metavar="HOST:PORT", help="a running Ray cluster, or auto (default: start one here)"
    )

    report = commands.add_parser("report", help="write a self-contained HTML file and results.json")
    report.set_defaults(run=_report)
    report.add_argument("runs", type=Path, metavar="RUNS_DIR", help="a sweep's directory, such as runs/demo")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="the file to write (default: RUNS_DIR/report.html)"
    )

    audit = commands.add_parser("audit", help="check what published points or a frontier share support")
    audit.set_defaults(run=_audit)
    audit.add_argument(
        "points",
        nargs="?",
        type=Path,
        metavar="CSV",
        help="columns method, kl, reward, and columns that match runs in pairs",
    )
    audit.add_argument("--share", metavar="K/N", help="K of N frontier points, if no points are published")
    audit.add_argument("--control", metavar="METHOD", help="the method that the others are compared with")

    imported = commands.add_parser("import", help="import runs of other software as a sweep")
    imported.set_defaults(run=_import)
    imported.add_argument(
        "source", type=Path, metavar="FILE", help="a log (.csv, .jsonl, .json) or a folder of logs"
    )
    imported.add_argument(
        "--config", required=True, type=Path, metavar="MAPPING", help="the meaning of the columns"
    )
    imported.add_argument("--output", required=True, type=Path, metavar="DIR", help="the directory to write")

    compare = commands.add_parser("compare", help="compare two sweeps, unpaired")
    compare.set_defaults(run=_compare)
    compare.add_argument("first", type=Path, metavar="DIR", help="a sweep's directory")
    compare.add_argument("second", type=Path, metavar="DIR", help="the sweep to compare with it")
    compare.add_argument("--output", type=Path, metavar="FILE", help="also write an HTML page")

    verify = commands.add_parser("verify", help="recompute every number of a report from its results")
    verify.set_defaults(run=_verify)
    verify.add_argument("report", type=Path, metavar="REPORT_OR_DIR", help="a report, or its directory")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; an integer >= 1 is expected")
    return int(text)


def _open(arguments: argparse.Namespace, *, record: bool) -> tuple[Plan, list[Cell], Store, int, Locked]:
    """Read the plan, lock it in its directory, and print what changed since it was locked."""
    plan = read_plan(arguments.config)
    expansion = expand(plan)
    store = Store(Path(plan.directory).absolute())
    locked = lock(plan, expansion, store.directory, record=record)
    for change in locked.changes:
        print(f"{plan.name}: changed since the plan was locked: {change}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return plan, expansion.cells, store, arguments.workers or max(1, cores // plan.threads), locked


def _plan(arguments: argparse.Namespace) -> int:
    plan, cells, store, workers, locked = _open(arguments, record=False)
    states = survey(cells, store)
    for cell in cells:
        print(f"{cell.id[:12]}  {states[cell.id].value:8}  seed {cell.seed:<10}  {cell}")
    todo = [cell for cell in cells if states[cell.id] is State.TODO]
    print(f"\n{plan.name}: {len(cells)} cells, {len(todo)} to run, in {plan.directory}")
    if todo:
        print("\n".join(_time(todo, Clock(cells, store), workers)))
    print("\n".join([*_arms(locked.arms), *_attainable(plan)]))
    if plan.comparisons:
        # Imported here as the statistics are slow to import
        from analysis.report.power import power

        print("\n".join(power(plan, arguments.pilot)))
    return 0


def _time(todo: Sequence[Cell], clock: Clock, workers: int) -> list[str]:
    lines = []
    for stage, count in Counter(cell.stage for cell in todo).items():
        seconds = clock.mean(stage)
        each = f"{seconds:.0f} s" if seconds else f"{ASSUMED_SECONDS:.0f} s (assumed: none has finished)"
        lines.append(f"  {stage}: {count} to run, each {each}")
    left = clock.left(todo, workers, ASSUMED_SECONDS)
    assert left is not None
    return [*lines, f"  about {duration(left)} with {workers} at a time"]


def _arms(arms: Mapping[str, Arm]) -> Iterator[str]:
    """Lines with what each arm optimises, and where its evaluation differs from the control's."""
    yield "arms:"
    for label, arm in arms.items():
        yield f"  {label}: {arm}"
        for key, (own, control) in arm.evaluation.items():
            yield f"    evaluated with {key} = {own}, the control with {control}: not the same outcome"


def _attainable(plan: Plan) -> list[str]:
    """Lines with the smallest p-value that the design allows."""
    grid, primary, others = plan.grid, plan.primary, plan.comparisons
    if not others:
        return [f"nothing is compared: {primary.control} is the only arm"]
    least = smallest_p(plan.pairs)
    verdict = "can reject" if least <= plan.level else "CANNOT reject, whatever the results"
    shared = plan.starting_points
    lines = [
        f"{', '.join(others)} against {primary.control}, by {_DECIDES[primary.outcome]}",
        f"  {len(grid.beta)} betas x {grid.replicates} replicates = {plan.pairs} matched pairs",
        f"  smallest two-sided p of a swap test {least:.2g}, "
        f"level {plan.level:.2g} (alpha {primary.alpha:g} over {plan.tests}, Holm): {verdict}",
    ]
    if shared:
        lines.append(f"  all runs share one {' and one '.join(shared)}: what is found holds given these")
    return lines


def _sweep(arguments: argparse.Namespace) -> int:
    plan, cells, store, workers, _ = _open(arguments, record=True)
    launcher = _launcher(arguments, plan, workers)
    with Stops(later=_STOPPING) as stops, Progress(plan.name, Console()) as progress:
        coordinator = Coordinator(plan, cells, store, launcher, progress)
        outcome = coordinator.run(lambda: stops.asked is not None)
    for cell in cells:
        # Link the stages from which all runs start to the directories named by their configurations
        if cell.point is None and outcome.states[cell.id] is State.DONE:
            store.link(cell.stage, cell.id)
    _print_outcome(plan, cells, store, outcome)
    if outcome.stopped and stops.asked is not None:
        stopped = Stopped(stops.asked)
        stopped.add_note(f"to resume: {arguments.command}")
        raise stopped
    return 0 if outcome.complete else 1


def _launcher(arguments: argparse.Namespace, plan: Plan, workers: int) -> Launcher:
    if arguments.launcher == "local":
        if arguments.address is not None:
            raise ConfigurationError(f"--address {arguments.address} needs --launcher ray")
        return LocalLauncher(workers, plan.threads, plan.module)
    try:
        from analysis.sweep.launchers.ray import RayLauncher
    except ImportError:
        raise ConfigurationError("--launcher ray needs Ray: pip install 'lit-klrb[ray]'") from None
    return RayLauncher(arguments.workers, plan.threads, arguments.address)


def _print_outcome(plan: Plan, cells: Sequence[Cell], store: Store, outcome: Outcome) -> None:
    """Print how the sweep ended, and each cell without a result."""
    counts = Counter(outcome.states.values())
    ended = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
    ran = f"{outcome.ran} run now" if outcome.ran else "no cell was run"
    print(f"{plan.name}: {len(cells)} cells: {ended}; {ran}")
    for cell in cells:
        state = outcome.states[cell.id]
        if state is State.FAILED:
            print(f"failed: {cell}; its log: {store.log(cell.id)}")
        elif state is State.BLOCKED:
            print(f"blocked: {cell}; {outcome.reasons[cell.id]}")
    for path in outcome.refused:
        published, refused = store.result(path.stem), read_result(path)
        assert published is not None
        members = ", ".join(key for key in refused if key != "checksum" and refused[key] != published[key])
        print(f"not deterministic: {path} differs from the published result of the same cell in: {members}")


def _report(arguments: argparse.Namespace) -> int:
    # Imported here as the libraries for figures are slow to import
    from analysis.report.build import build

    print(build(arguments.runs, arguments.output))
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from analysis.report.audit import audit

    print("\n".join(audit(arguments.points, arguments.share, arguments.control)))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    print(import_runs(arguments.source, arguments.config, arguments.output))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from analysis.report.side_by_side import side_by_side

    print("\n".join(map(_printable, side_by_side(arguments.first, arguments.second, arguments.output))))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from analysis.report.verify import verify

    found = verify(arguments.report)
    sweep, locked = found.sweep, found.sweep.locked
    print(f"data: {sweep.directory}, {len(sweep.runs)} results")
    print(f"plan: {_plan_state(locked)}")
    for problem in sweep.problems:
        print(f"problem: {_printable(problem.text)}")
    for line in found.differences:
        print(f"differs: {_printable(line)}")
    for line in found.not_compared:
        print(f"not compared: {_printable(line)}")
    if found.differences:
        return 1
    if found.not_compared:
        print("everything that was compared agrees with the results")
        return NOT_ALL_COMPARED
    print("every number agrees with the results")
    return 0


def _plan_state(locked: LockedPlan | None) -> str:
    if locked is None:
        return "none"
    state = "recomputed" if locked.recomputed else "does NOT recompute"
    changed = "; changed after results" if locked.changed_after_results else ""
    return f"{locked.hash}, {state}{changed}"


def _printable(text: str) -> str:
    """Escape control characters, which could rewrite the terminal, in text from a file."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
