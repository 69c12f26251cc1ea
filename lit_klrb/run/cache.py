"""A cache on disk for expensive results that depend only on their key."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lit_klrb.distributed import gather
from lit_klrb.files import PARTIAL, local_path, write_atomically
from lit_klrb.run.checkpoints import digest, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
# Maximum size in bytes; the least recently used results are removed.
LIMIT = 2_000_000_000


def default_folder() -> Path:
    """`LIT_KLRB_CACHE`, or lit_klrb in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return local_path(os.environ.get("LIT_KLRB_CACHE") or f"{home}/lit_klrb", "LIT_KLRB_CACHE")


def cached(name: str, key: Any, compute: Callable[[], T], fits: Callable[[T], bool] = lambda _: True) -> T:
    """The result of `compute`, read from disk if it was computed before with the same key.

    Args:
        name: A name for the result, with which the file's name begins.
        key: Everything the result depends on besides this package's code, as plain numbers, strings, lists
            and dictionaries.
        compute: Gives tensors, numbers, strings, lists and tuples; called if a process cannot use the file.
        fits: Whether what a file holds is of the form that `compute` gives; it may raise anything if not.
    """
    path = default_folder() / f"{name}-{_digest([_code(), key])[:32]}.pt"
    results: list[T] = []
    with contextlib.suppress(Exception):  # missing, damaged, or of another form
        result = read(path)["result"]
        if fits(result):
            results.append(result)
            os.utime(path)  # for the order of removal
    # Processes compute together, also if their caches are on different machines
    if all(gather(bool(results))):
        (result,) = results
    else:
        result = compute()
        buffer = io.BytesIO()
        torch.save({"result": result}, buffer)
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            write_atomically(path, buffer.getbuffer())
            trim(LIMIT)
    return result


def cached_folder(name: str, key: Any) -> Path:
    """The place of a folder that depends only on its key; it is never removed, whatever its size."""
    return default_folder() / f"{name}-{_digest(key)[:32]}"


def trim(left: int) -> None:
    """Remove the least recently used results until the rest has at most so many bytes."""
    for path, stat in sorted(_files(), key=lambda file: -file[1].st_mtime):
        left -= stat.st_size
        if left < 0:
            path.unlink(missing_ok=True)


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of a model's configuration, and of the names and bytes of all its weights."""
    return _digest([model.config.to_json_string(use_diff=False), digest(model.state_dict())])


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    """The cache's files, including unfinished ones of killed processes; other files are ignored."""
    pattern = re.compile(rf"\.?[a-z_]+-[0-9a-f]{{32}}\.pt(\.[0-9a-f]+{re.escape(PARTIAL)})?")
    for path in default_folder().glob("*"):
        if pattern.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(OSError):  # another process may remove it
                yield path, path.stat()


@functools.cache
def _code() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
