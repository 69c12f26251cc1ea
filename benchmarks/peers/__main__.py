"""Certify each released KL and distillation loss of other software, and compare with the kept verdicts.

usage: python -m benchmarks.peers [--wheels FOLDER] [--snapshots FOLDER] [--keep] [software ...]

exit codes: 0 if every verdict is the kept one; 1 if not, or a loss could not be called, with what
changed; 2 for wrong usage. With --keep the verdicts are kept, and
replication/evidence/released_losses.md is written.
"""

import argparse
import pkgutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.peers import adapters, page, verdicts
from benchmarks.peers.examine import examine

ADAPTERS = [module.name for module in pkgutil.iter_modules(adapters.__path__)]
# Those whose losses take the longest start first
SLOWEST = ("trl", "slime", "tinker", "verl", "prime_rl", "skyrl")


def two_processes() -> Executor:
    """Runs each task in a process of its own, two at a time.

    With one thread each: with two, the whole table takes four times the CPU seconds.
    """
    return ProcessPoolExecutor(
        2, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,), max_tasks_per_child=1
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the software in two processes, say what differs, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "software", nargs="*", choices=[[], *ADAPTERS], metavar="software", help=", ".join(ADAPTERS)
    )
    parser.add_argument(
        "--wheels", type=Path, default=Path(".venv-peers/wheels"), help="where wheels have their dates"
    )
    parser.add_argument("--snapshots", type=Path, help="a folder with git directories named owner+name")
    parser.add_argument("--keep", action="store_true", help="keep the verdicts, and write the page")
    options = parser.parse_args(argv)
    start, kept, changed = time.monotonic(), verdicts.read(verdicts.FILE), False
    chosen = options.software or sorted(ADAPTERS, key=lambda name: (name not in SLOWEST, name))
    found: verdicts.Verdicts = {}
    with two_processes() as pool:
        tasks = {name: pool.submit(examine, name, options.wheels, options.snapshots) for name in chosen}
        for name, task in tasks.items():
            result = task.result()
            if isinstance(result, str):
                print(f"{name}: {result}; its last verdicts stay", flush=True)
                continue
            failures = result.pop("failures")
            lines = [f"FAILED {line}" for line in failures] + verdicts.differences(kept.get(name, {}), result)
            changed = changed or bool(lines)
            release = f"{result['version']} ({result['date'] or 'no date'})"
            print(f"{name} {release}: {len(result['losses'])} losses, {len(lines)} changed", flush=True)
            print(*[f"  {line}" for line in lines], sep="\n", end="\n" if lines else "", flush=True)
            found[name] = result
    losses = sum(len(about["losses"]) for about in found.values())
    print(f"{losses} losses of {len(found)} software in {time.monotonic() - start:.0f} s")
    if options.keep:
        whole = {name: found.get(name, kept.get(name)) for name in ADAPTERS if name in {*found, *kept}}
        verdicts.write(whole, verdicts.FILE)
        page.write(whole, page.PAGE)
        print(f"{verdicts.FILE} and {page.PAGE} are written")
        return 0
    if changed:
        print("verdicts changed: read the release, then keep them with --keep", file=sys.stderr)
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
