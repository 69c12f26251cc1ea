"""Folders that appear complete or not at all."""

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lit_klrb.files.locks import try_lock

# In the hidden folder of an unfinished folder: the file with the lock and its content, and what is replaced.
_MARK, _MARKED, _EARLIER = "unfinished", b"an unfinished folder of lit_klrb\n", "earlier"


@contextlib.contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder beside `target`, to be filled; after the block it is moved to its place.

    It lies in a hidden folder with a random name, a mark of this package and a lock that the kernel releases
    with the process. Those of killed processes with the same target are removed first: only folders with the
    mark whose lock is free.

    Args:
        target: Where the folder is moved to: a new name or an empty folder.
        replace: Whether to replace a folder there, which is removed only after that. Otherwise, a folder that
            another process has made meanwhile stays.

    Yields:
        The folder to fill. It is removed if the block raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    outer = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    outer.mkdir()
    try:
        with (outer / _MARK).open("xb", buffering=0) as mark:
            with contextlib.suppress(OSError):  # without locks, nobody may know it as abandoned
                if try_lock(mark.fileno()):
                    mark.write(_MARKED)
            (outer / "new").mkdir()
            yield outer / "new"
            if replace and target.exists():
                target.rename(outer / _EARLIER)
            try:
                (outer / "new").rename(target)  # replaces an empty folder
            except OSError:
                if replace or not target.is_dir():
                    raise
    finally:
        _remove_unfinished_folder(outer, target)


def remove_abandoned(target: Path) -> list[Path]:
    """Remove what killed processes left of `new_folder(target)`, and return it."""
    removed = []
    for outer in target.parent.glob(f".{glob.escape(target.name)}.*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(outer / _MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb", buffering=0) as mark:
                # The mark is written under the lock
                if outer.is_symlink() or mark.read(99) != _MARKED or not try_lock(descriptor):
                    continue
            _remove_unfinished_folder(outer, target)
            removed.append(outer)
    return removed


def _remove_unfinished_folder(outer: Path, target: Path) -> None:
    """Remove it, after moving back an earlier folder whose place is still free."""
    if (outer / _EARLIER).exists() and not target.exists():
        (outer / _EARLIER).rename(target)
    shutil.rmtree(outer, ignore_errors=True)
