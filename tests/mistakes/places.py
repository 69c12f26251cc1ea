"""Mistakes in paths: invalid run directories, and obstacles in place of a file."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake

# What can be in the place of a file.
KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "dangling": lambda path: path.symlink_to("nothing"),
    "circle": lambda path: path.symlink_to(path.name),
}


def odd_places(root: Path, *suffixes: str) -> None:
    """One of each kind, with names of files."""
    for suffix in suffixes:
        for kind, make in KINDS.items():
            make(root / f"{kind}.{suffix}")


def make_places(root: Path) -> None:
    """Write directories with an obstacle to a run."""
    (root / "taken").mkdir()
    (root / "taken" / "checkpoints").write_text("a file where a folder should be")
    (root / "odd_run").mkdir()
    for name in ("config.yaml", "summary.json", "metrics", "checkpoints/last.ckpt"):
        (root / "odd_run" / name).mkdir(parents=True)


def wrong_places() -> Iterator[Mistake]:
    """Invalid run directories; `predict` needs only a directory for its file."""
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
