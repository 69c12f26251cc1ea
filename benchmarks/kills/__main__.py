"""Kills training runs and sweeps at random times and compares their results.

Starting Python with its libraries takes seconds, a small run less than one. This process therefore loads the
libraries once, with one thread, and forks a child for each run: SIGKILL to a forked child is a real kill. The
outcome of each is appended to a file; the same command goes on from there.

Kinds of kills:
  anywhere  training runs of every module, at a moment drawn over the whole run
  write     between the begin of a checkpoint's save and its rename, with the run directory and the folder of
            temporary files on different file systems, either way round
  full      on a file system with room for half to four checkpoints; a run that ends because the disk is full
            is resumed and compared, too, and not counted as killed; needs root, to mount it
  sweep     sweeps of six cells, whose coordinator is killed
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.table import markdown

COUNTS = {"anywhere": 130, "write": 50, "full": 20, "sweep": 20}
KILLS_OF_A_SWEEP = 5
# Must be set before libraries are imported, as processes with several threads cannot be forked.
for library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{library}_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> int:
    """Do the remaining kills and print the table; exit code 1 if a run is damaged or different."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", nargs="*", choices=[[], *COUNTS], metavar="kind", help="all by default")
    parser.add_argument("--count", type=int, metavar="N", help=f"kills of each kind (default: {COUNTS})")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/kills"), metavar="DIR", help="default: runs/kills"
    )
    parser.add_argument(
        "--other", type=Path, default=Path("/dev/shm"), metavar="DIR", help="on another file system than DIR"
    )
    arguments = parser.parse_args()
    for kind in arguments.kinds or COUNTS:
        kill(kind, arguments.count or COUNTS[kind], arguments.folder.absolute(), arguments.other)
    print(table(arguments.folder))
    return int(
        any(outcome["problems"] for kind in COUNTS for outcome in read_outcomes(arguments.folder, kind))
    )


def kill(kind: str, count: int, folder: Path, other: Path) -> None:
    """Kill until there are `count` kills of a kind on record."""
    if kills_left(kind, count, folder) <= 0:
        return
    import torch

    import lit_klrb.cli.lightning  # noqa: F401  what every child needs

    from . import runs, sweeps
    from .case import write_configs

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    if other.stat().st_dev == folder.stat().st_dev:
        raise SystemExit(f"error: --other {other} is on the same file system as {folder}")
    write_configs(folder)
    aim = runs.Aim()
    if kind == "sweep":
        whole_sweep = sweeps.undisturbed(folder)
    else:
        whole = runs.undisturbed(folder)
    while (left := kills_left(kind, count, folder)) > 0:
        number = len(read_outcomes(folder, kind))
        if kind == "sweep":
            outcome = sweeps.kill_sweep(number, min(left, KILLS_OF_A_SWEEP), whole_sweep)
        else:
            outcome = runs.kill_one(kind, number, whole, folder, other, aim)
        line = json.dumps({"kind": kind, "number": number, **asdict(outcome)})
        with (folder / "outcomes.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        if outcome.problems and not outcome.kills:
            return  # what ends by itself in this way would do so forever


def kills_left(kind: str, count: int, folder: Path) -> int:
    """How many of `count` kills are not on record."""
    return count - sum(outcome["kills"] for outcome in read_outcomes(folder, kind))


def read_outcomes(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The outcomes of one kind on record."""
    path = folder / "outcomes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [outcome for outcome in map(json.loads, lines) if outcome["kind"] == kind]


def table(folder: Path) -> str:
    """All recorded outcomes, as Markdown."""
    header = [
        "kind",
        "kills",
        "during a write",
        "runs",
        "resumed from a file",
        "bit-identical",
        "damaged or different",
    ]
    rows = []
    for kind in COUNTS:
        done = read_outcomes(folder, kind)
        sums = [str(sum(outcome[key] for outcome in done)) for key in ("kills", "in_write", "resumed")]
        bad = sum(bool(outcome["problems"]) for outcome in done)
        rows.append([kind, *sums[:2], str(len(done)), sums[2], str(len(done) - bad), str(bad)])
    return markdown(header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
