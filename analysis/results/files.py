"""Files that are there whole or not at all, whatever is killed and whenever."""

import os
import secrets
from pathlib import Path

# How the name of a temporary file ends; it starts with a dot and the name of the file it is written for.
TEMPORARY = ".tmp"


def publish(path: Path, content: bytes) -> bool:
    """Create `path` with `content`, durably and only if it does not exist yet: the first writer wins.

    The content is complete and on disk before the name appears: it is written to a temporary file in the
    same directory, synced, and linked to `path`, which fails where the name exists. A kill at any moment
    leaves at most the temporary file.

    Returns:
        Whether this call created the file.
    """
    temporary = _written(path, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def replace(path: Path, content: bytes) -> None:
    """Give `path` a new content, durably: a reader sees the old one or the new one, never a mixture."""
    temporary = _written(path, content)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: Path, content: bytes) -> Path:
    """A new temporary file beside `path` with `content` on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
