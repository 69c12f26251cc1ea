"""Training runs that are killed once at a random time and resumed."""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lit_klrb import schema
from lit_klrb.cli.main import main

from .case import STAGES
from .children import BEGIN, RENAMED, Child
from .compare import Outcome, different, torn

ANYWHERE, WRITE, FULL = "anywhere", "write", "full"
# Interval of checkpoints, on which training does not depend, and their minimum number.
RHYTHMS = (
    (("--checkpoint.every_n_train_steps", "1"), 16),
    (("--checkpoint.every_n_train_steps", "5"), 4),
    (("--checkpoint.train_time_interval", "0:00:00.1"), 3),
)
# Share of the kills that are spread over the whole run; the others come after its first checkpoint.
SPREAD = 0.2
# Size in bytes of the file system that is nearly full.
DISK = 64_000_000


class Undisturbed(NamedTuple):
    """A run that was not killed.

    Args:
        path: Its directory.
        seconds: How long it took.
        checkpoint: Bytes of a checkpoint.
    """

    path: Path
    seconds: float
    checkpoint: int


@dataclass
class Aim:
    """The time of the next kill within a save: later after a hit, earlier after a miss."""

    seconds: float = 0.01

    def draw(self, rng: random.Random) -> float:
        """Seconds after the start of the save."""
        return rng.uniform(0, self.seconds)

    def learn(self, hit: bool) -> None:
        """Record the result of the last kill."""
        self.seconds = min(1.0, max(1e-4, self.seconds * (1.15 if hit else 0.8)))


def undisturbed(folder: Path) -> dict[str, Undisturbed]:
    """An undisturbed run of each stage, made if it does not exist."""
    found = {}
    for stage in STAGES:
        run, seconds = folder / stage, folder / f"{stage}.seconds"
        if not seconds.exists():
            shutil.rmtree(run, ignore_errors=True)
            argv = ["--config", f"{folder / stage}.yaml", "--trainer.default_root_dir", str(run)]
            argv = ["fit", *argv, *RHYTHMS[0][0]]
            with Child(main, argv, folder / f"{stage}.log", _environment(folder)) as child:
                if child.wait() != 0:
                    raise RuntimeError(f"{stage}: {child.last_line}")
            seconds.write_text(f"{time.monotonic() - child.began:.3f}")
        size = (run / schema.CHECKPOINT).stat().st_size
        found[stage] = Undisturbed(run, float(seconds.read_text()), size)
    return found


def kill_one(
    kind: str, number: int, whole: dict[str, Undisturbed], folder: Path, other: Path, aim: Aim
) -> Outcome:
    """Kill a run, resume it, and compare it with the undisturbed one; repeated until the kill meets the run.

    Args:
        kind: Where the kill is aimed.
        number: Decides stage, rhythm and moment.
        whole: The undisturbed runs.
        folder: Where everything is kept.
        other: A folder on another file system.
        aim: Where in a save kills go.
    """
    rng = random.Random(f"{kind} {number}")
    stage = STAGES[number % len(STAGES)]
    while True:
        with _place(kind, number, whole[stage], folder, other, rng) as (place, temporary, filler):
            outcome = Outcome(stage)
            if _killed(kind, outcome, rng, whole[stage], place, temporary, aim):
                _go_on(outcome, whole[stage], place, temporary, filler)
                return outcome


@contextmanager
def _place(
    kind: str, number: int, whole: Undisturbed, folder: Path, other: Path, rng: random.Random
) -> Iterator[tuple[Path, Path, Path | None]]:
    """A folder for the run, one for temporary files, and the file that fills the disk, if any."""
    here, there = folder / "trial", other / f"kills.{os.getpid()}"
    for path in (here, there):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    # The two file systems alternate.
    here, there = (here, there) if number % 2 else (there, here)
    filler = None
    try:
        if kind == FULL:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(here)], check=True)
            filler = here / "filler"
            filler.write_bytes(bytes(DISK - 50_000 - round(rng.uniform(0.5, 4) * whole.checkpoint)))
        yield here, there, filler
    finally:
        if kind == FULL:
            subprocess.run(["umount", str(here)], check=True)
        shutil.rmtree(here, ignore_errors=True)
        shutil.rmtree(there, ignore_errors=True)


def _environment(temporary: Path) -> dict[str, str]:
    return {"TMPDIR": str(temporary), "LIT_KLRB_CACHE": str(temporary / "cache")}


def _command(outcome: Outcome, whole: Undisturbed, place: Path) -> list[str]:
    config = whole.path.with_name(f"{outcome.what}.yaml")
    return ["fit", "--config", str(config), "--trainer.default_root_dir", str(place / "run")]


def _killed(
    kind: str,
    outcome: Outcome,
    rng: random.Random,
    whole: Undisturbed,
    place: Path,
    temporary: Path,
    aim: Aim,
) -> bool:
    """Start a run and kill it; return whether it ended before the kill."""
    in_write = kind == WRITE or (kind == FULL and rng.random() < 0.5)
    rhythm, saves = RHYTHMS[0] if in_write else rng.choice(RHYTHMS)
    argv = [*_command(outcome, whole, place), *rhythm]
    with Child(main, argv, place / "log", _environment(temporary)) as child:
        if not in_write and rng.random() < SPREAD:
            child.wait(rng.uniform(0, whole.seconds))
        else:
            child.wait_for_save(rng.randint(1, saves))
            child.wait(aim.draw(rng) if in_write else rng.uniform(0, whole.seconds / saves))
        code = child.kill()
    hit = code < 0 and child.heard.endswith(BEGIN)
    if in_write:
        aim.learn(hit)
    outcome.kills, outcome.in_write = int(code < 0), int(hit)
    if code > 0 and not (kind == FULL and "No space left" in child.last_line):
        outcome.problems.append(f"exit code {code}: {child.last_line}")
    if (saved := child.heard.count(RENAMED)) and not (place / "run" / schema.CHECKPOINT).exists():
        outcome.problems.append(f"no checkpoint, though {saved} were saved")
    outcome.problems += torn(place / "run")
    missed = code == 0 or (kind == WRITE and not hit)
    return not missed or bool(outcome.problems)


def _go_on(outcome: Outcome, whole: Undisturbed, place: Path, temporary: Path, filler: Path | None) -> None:
    """Resume the run from its checkpoint with the printed command, or start again without one."""
    if filler is not None:
        filler.unlink()
    run = place / "run"
    argv = _command(outcome, whole, place)
    if (run / schema.CHECKPOINT).exists() and not outcome.problems:
        outcome.resumed = 1
        config, checkpoint = run / schema.CONFIG, run / schema.CHECKPOINT
        argv = ["fit", "--config", str(config), "--ckpt_path", str(checkpoint)]
    with Child(main, argv, place / "log", _environment(temporary)) as child:
        code = child.wait()
    if code != 0:
        outcome.problems.append(f"resuming ended with exit code {code}: {child.last_line}")
    else:
        outcome.problems += different(whole.path, run)
