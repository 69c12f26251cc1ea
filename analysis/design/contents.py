"""Hashes of local models and data, which do not depend on where files lie or when they were written.

A checkpoint that is trained again has the same weights, but another run's id and the paths of its machine.
Its hash covers everything else, and is computed without torch and without running pickled code.
"""

import functools
import hashlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from analysis.results.store import digest

# Entries of a checkpoint that say which run wrote it and where; no later run reads them from a model's path.
_PROVENANCE = ("run", "callbacks")
# Objects per byte of a pickle. A real one has less than one; a crafted one can refer to itself without end.
_OBJECTS_PER_BYTE = 10
# Bytes that are read at a time.
_PIECE = 1 << 20


def content_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, a checkpoint's content, or the names and contents of a folder's files."""
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        return digest({file.relative_to(path).as_posix(): content_hash(file) for file in files})
    status = path.stat()
    return _hash_as_it_is(path, status.st_mtime_ns, status.st_size)


@functools.cache  # hundreds of cells have the same models and data
def _hash_as_it_is(path: Path, modified: int, size: int) -> str:
    """The hash of a file; computed again if its size or modification time changes."""
    try:
        return _checkpoint_hash(path)
    except Exception:  # another kind of file, or a damaged one: these raise all kinds of exceptions
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _checkpoint_hash(path: Path) -> str:
    """The hash of a checkpoint without its provenance.

    Raises:
        Exception: Of any kind, if the file is not a checkpoint of Lightning.
    """
    with zipfile.ZipFile(path) as archive:
        if sum(record.file_size for record in archive.infolist()) > path.stat().st_size:
            raise ValueError("unpacks to more than its size")
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        source = archive.read(pickled)
        content = _Reader(archive, pickled.removesuffix("data.pkl"), source).load()
    kept = {name: value for name, value in content.items() if name not in _PROVENANCE}
    if "state_dict" not in kept:
        raise ValueError("not a checkpoint")
    result = hashlib.sha256()
    for count, leaf in enumerate(_walk(kept)):
        if count > _OBJECTS_PER_BYTE * len(source):
            raise ValueError("refers to itself")
        result.update(f"{leaf!r}\n".encode())
    return result.hexdigest()


class _Reader(pickle._Unpickler):
    """Reads the structure of a pickle; every class in it becomes an `_Inert` one, and nothing is called.

    The version of `Unpickler` in C allocates whatever memory a crafted pickle asks for.
    """

    def __init__(self, archive: zipfile.ZipFile, folder: str, source: bytes) -> None:
        super().__init__(BytesIO(source))
        self._archive, self._folder = archive, folder
        self._stored: dict[str, str] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(f"{module}.{name}", (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage: its type, size and bytes, regardless of the device that it was on."""
        _, kind, record, _, size = pid
        if record not in self._stored:
            content = hashlib.sha256()
            with self._archive.open(f"{self._folder}data/{record}") as source:
                while piece := source.read(_PIECE):
                    content.update(piece)
            self._stored[record] = content.hexdigest()
        return kind.__name__, size, self._stored[record]


class _Inert:
    """An object that only stores the arguments it was made with."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> "_Inert":
        made = super().__new__(cls)
        made.arguments = arguments
        return made


def _walk(value: Any) -> Iterator[object]:
    """Everything in a nested object, in order, with the size of each object that contains others."""
    if isinstance(value, _Inert):
        yield type(value).__name__
        value = vars(value)
    if isinstance(value, dict):
        yield "dict", len(value)
        value = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        yield type(value).__name__, len(value)
    else:
        if not isinstance(value, str | bytes | int | float | None):
            raise TypeError(f"has no canonical form: {type(value).__name__}")
        yield value
        return
    for part in value:
        yield from _walk(part)
