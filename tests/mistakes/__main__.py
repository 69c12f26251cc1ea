"""`python -m mistakes`: run every mistake and report how each one ends.

One line of JSON is written for each; a mistake that already has a line is not run again.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from conftest import CHAIN, Commands

from mistakes.driver import RIGHT, SECONDS, Mistake, Verdict, judge, summary
from mistakes.tables import TABLES, Desk, make_files

# The table that depends on the finished runs.
STRANGERS = "strangers"
NAMES = (*TABLES, STRANGERS)


def main() -> int:
    """Run the given tables, or all; return 1 if any mistake ends badly."""
    parser = argparse.ArgumentParser("python -m mistakes", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--work", type=Path, default=Path("runs/mistakes"), help="files, and the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when a mistake counts as hung")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    import lit_klrb.cli.lightning  # noqa: F401

    desk = desk_at(work)
    results = work / "results.jsonl"
    known = {entry["mistake"]: entry for entry in read(results)}
    counts = {}
    for name in arguments.tables or NAMES:
        counts[name] = Counter()
        for mistake in desk.strangers() if name == STRANGERS else TABLES[name]():
            key = f"{name} {mistake}"
            if key not in known:
                verdict, output, seconds = desk.judge(mistake, arguments.seconds)
                known[key] = {
                    "mistake": key,
                    "verdict": verdict.name,
                    "seconds": round(seconds, 2),
                    "expected": mistake.line,
                    "output": output,
                }
                with results.open("a") as file:
                    file.write(json.dumps(known[key]) + "\n")
            counts[name][Verdict[known[key]["verdict"]]] += 1
        print(f"{name}: {summary(counts[name])}", flush=True)
    total = sum(counts.values(), Counter())
    print(f"all: {summary(total)}")
    return int(bool(total.keys() - RIGHT))


def desk_at(work: Path) -> Desk:
    """The finished runs and files that mistakes use, created if they do not exist."""
    commands = Commands(work / "chain")
    for stage in CHAIN:
        if not Path(commands.checkpoint(stage)).exists():
            made = judge(Mistake([], None), lambda stage=stage: commands.run("fit", stage), 600)
            assert made.verdict is Verdict.ACCEPTED, made.output
    files = work / "files"
    if not files.exists():
        make_files(work / "new", work / "chain")
        (work / "new").rename(files)
    scratch = work / "scratch"

    def empty() -> Path:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        return Path(tempfile.mkdtemp(dir=scratch))

    return Desk(files, commands, empty)


def read(results: Path) -> list[dict]:
    """The recorded results."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


if __name__ == "__main__":
    sys.exit(main())
