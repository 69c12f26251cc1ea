"""Locks of files and directories, which the kernel releases with the process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Lock an open file or directory; False if another process has. The kernel releases it when it is closed.

    Raises:
        OSError: If its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Wait until no other process is in a block with the lock of this directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Lock a directory, which is no link, until the end of the block or of the process.

    Yields:
        Whether it was free.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)
