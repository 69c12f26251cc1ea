"""Mistakes in places: run directories that cannot be, and what may lie where a file should be."""

import os
from collections.abc import Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake


def odd_places(root: Path, *suffixes: str) -> None:
    """A folder, a pipe and two broken links, each named like a file."""
    for suffix in suffixes:
        (root / f"folder.{suffix}").mkdir()
        os.mkfifo(root / f"fifo.{suffix}")
        (root / f"dangling.{suffix}").symlink_to("nothing")
        (root / f"circle.{suffix}").symlink_to(f"circle.{suffix}")


def make_places(root: Path) -> None:
    """Directories in which something is in the way of a run."""
    (root / "taken").mkdir()
    (root / "taken" / "checkpoints").write_text("a file where a folder should be")
    (root / "odd_run").mkdir()
    for name in ("config.yaml", "summary.json", "metrics", "checkpoints/last.ckpt"):
        (root / "odd_run" / name).mkdir(parents=True)


def wrong_places() -> Iterator[Mistake]:
    """Run directories that cannot be; `predict` needs no more of one than a place for its file."""
    for place in (
        "FILES/a_file",
        "FILES/a_file/run",
        "FILES/fifo.jsonl",
        "FILES/circle.jsonl",
        "FILES/taken",
        "FILES/odd_run",
        "/proc/nowhere",
        "/dev/null",
        "/dev/full/run",
        "/sys/run",
        "x" * 300,
    ):
        line = rf"^error: trainer\.default_root_dir: .*{escape(place[:100])}"
        yield Mistake(["--trainer.default_root_dir", place], line)
        fine = place in ("FILES/taken", "FILES/odd_run")
        yield Mistake(["--trainer.default_root_dir", place], None if fine else line, command="predict")
