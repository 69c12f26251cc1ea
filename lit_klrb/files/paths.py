"""Paths that users name, and whether they may be written."""

import os
from pathlib import Path

from lit_klrb.errors import ConfigurationError


def local_path(text: str, key: str | None = None) -> Path:
    """The path that a text names on this machine, with `~` expanded.

    Raises:
        ConfigurationError: If it has a null character, is the address of a remote file, or begins with the
            home of a user that does not exist.
    """
    if "\0" in text:
        raise ConfigurationError(f"{text!r} is not a path: it has a null character", key=key)
    if "://" in text:
        raise ConfigurationError(f"{text} is an address; the path of a local file is expected", key=key)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigurationError(f"{text}: there is no such user", key=key)
    return Path(expanded)


def check_target(path: Path, key: str | None = None) -> None:
    """Check that a path is free or an ordinary file, in a writable directory."""
    check_replaceable(path, key)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        problem = f"{folder} is not a directory that can be written"
        raise ConfigurationError(f"{path} cannot be written: {problem}", key=key)


def check_replaceable(path: Path, key: str | None = None) -> None:
    """Check that a path is free or an ordinary file, not a link or a device."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigurationError(f"{path} is a link or not a file; name a new or an ordinary file", key=key)
