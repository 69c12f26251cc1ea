"""Sweeps whose coordinator is killed repeatedly at random times until they are complete."""

import contextlib
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from analysis.cli import main
from analysis.results import DamagedFileError, layout
from analysis.results.store import read_result

from .case import write_plan
from .children import Child, session
from .compare import Outcome

# Seconds in which the workers of a killed coordinator must be gone.
PATIENCE = 30.0


def _start(plan: Path, workers: int, folder: Path) -> Child:
    environment = {"LIT_KLRB_CACHE": str(folder / "cache")}
    argv = ["sweep", "--config", str(plan), "--workers", str(workers)]
    return Child(main, argv, plan.with_suffix(".log"), environment)


def _published(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in layout.result_paths(directory)}


def undisturbed(folder: Path) -> Path:
    """An undisturbed sweep, made if it does not exist."""
    directory = folder / "whole_sweep"
    with _start(write_plan(folder, directory), 1, folder) as child:
        if child.wait() != 0:
            raise RuntimeError(f"the sweep ended with exit code {child.code}: {child.last_line}")
        print(f"an undisturbed sweep: {time.monotonic() - child.began:.0f} s", file=sys.stderr)
    return directory


def kill_sweep(number: int, kills: int, whole: Path) -> Outcome:
    """Kill a sweep's coordinator repeatedly, finish the sweep, and compare its results.

    Args:
        number: Decides the number of workers and the moments.
        kills: How often it is killed.
        whole: The undisturbed sweep.
    """
    rng = random.Random(f"sweep {number}")
    workers = 1 + number % 2
    outcome = Outcome(f"{workers} workers")
    folder, directory = whole.parent, whole.with_name("sweep")
    shutil.rmtree(directory, ignore_errors=True)
    plan = write_plan(folder, directory)
    while outcome.kills < kills and not outcome.problems:
        with _start(plan, workers, folder) as child:
            # One kill for each number of results, and four of five after a cell has started: before,
            # libraries are imported.
            while len(layout.result_paths(directory)) < outcome.kills and child.wait(0.02) is None:
                pass
            if rng.random() < 0.8:
                _wait_for_news(child, directory)
            child.wait(rng.uniform(0, 4))
            child.kill(alone=True)
        if child.code == 0:
            shutil.rmtree(directory)  # it ended before the kill
            continue
        outcome.problems += _left_running(child)
        outcome.problems += _torn(directory)
        outcome.kills += 1
        seconds = time.monotonic() - child.began
        done = len(layout.result_paths(directory))
        print(f"sweep {number}, kill {outcome.kills} after {seconds:.0f} s: {done} results", file=sys.stderr)
    with _start(plan, workers, folder) as child:
        if child.wait() != 0:
            outcome.problems.append(f"ended with exit code {child.code}: {child.last_line}")
    logs = directory.glob(f"{layout.CELLS}/*/{layout.LOG}")
    outcome.resumed = sum(bool(re.search(r"^\$ .* fit .*--ckpt_path", log.read_text(), re.M)) for log in logs)
    expected, found = _published(whole), _published(directory)
    names = sorted({*expected, *found})
    outcome.problems += [f"different: {name}" for name in names if expected.get(name) != found.get(name)]
    for name in (layout.REFUSED, layout.FAILED):
        outcome.problems += [f"{path}" for path in (directory / name).glob("*")]
    return outcome


def _wait_for_news(child: Child, directory: Path) -> None:
    """Wait until a cell prints something."""

    def printed() -> set[tuple[Path, int]]:
        with contextlib.suppress(OSError):
            return {
                (path, path.stat().st_mtime_ns) for path in directory.glob(f"{layout.CELLS}/*/{layout.LOG}")
            }
        return set()

    before = printed()
    while printed() <= before and child.wait(0.02) is None:
        pass


def _left_running(child: Child) -> Iterator[str]:
    """What a killed coordinator's workers do for too long."""
    deadline = time.monotonic() + PATIENCE
    while session(child.pid):
        if time.monotonic() > deadline:
            yield f"workers still run {PATIENCE:g} s after their coordinator"
            return
        time.sleep(0.02)


def _torn(directory: Path) -> Iterator[str]:
    for path in layout.result_paths(directory):
        try:
            read_result(path)
        except DamagedFileError as error:
            yield str(error)
