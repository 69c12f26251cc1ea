"""Hashes of local models and data, which do not depend on where files lie or when they were written.

The checkpoint of a run that has ended counts by its trained weights, whose hash the run wrote beside it: a
checkpoint that is trained again has the same weights, but another run's id and the paths of its machine.
"""

import functools
import hashlib
from pathlib import Path

from analysis.results.store import digest
from lit_klrb import schema
from lit_klrb.files import read_object


def content_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, a run's trained weights, or the names and contents of a folder's files."""
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        return digest({file.relative_to(path).as_posix(): content_hash(file) for file in files})
    status = path.stat()
    return _weights_hash(path) or _hash_of_bytes(path, status.st_mtime_ns, status.st_size)


def _weights_hash(path: Path) -> str:
    """The hash in the summary of the run whose last checkpoint this is; "" unless it was written after it."""
    run = path.absolute().parents[1]
    summary = run / schema.SUMMARY
    if path.absolute() != run / schema.CHECKPOINT or not summary.is_file():
        return ""
    if summary.stat().st_mtime_ns < path.stat().st_mtime_ns:  # it was trained further, or replaced
        return ""
    return str(read_object(summary).get(schema.WEIGHTS, ""))


@functools.cache  # hundreds of cells have the same models and data
def _hash_of_bytes(path: Path, modified: int, size: int) -> str:
    """The hash of a file; computed again if its size or modification time changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
