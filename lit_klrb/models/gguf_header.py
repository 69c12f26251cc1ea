"""The header of a GGUF file, read with bounds, as the file may come from an untrusted source.

The libraries that read the tensors trust every number in a header. Here, nothing is taken for granted: counts
and lengths are compared with the file's own size before anything is allocated.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lit_klrb.errors import ConfigurationError, refusing

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
# Bounds above every published model: header bytes, settings, elements of all arrays, tensors, dimensions.
MAX_BYTES, MAX_SETTINGS, MAX_ELEMENTS, MAX_TENSORS, MAX_DIMENSIONS = 2**27, 2**12, 2**21, 2**16, 4
# Formats of the types of settings, without text and arrays.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


class GGUFTensor(NamedTuple):
    """A tensor's entry in the header: name, shape (fastest dimension first), type, place in the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class GGUFHeader(NamedTuple):
    """Settings and tensors of a file."""

    settings: dict[str, Any]
    tensors: list[GGUFTensor]


def read_header(path: Path, block_sizes: Mapping[int, tuple[int, int]]) -> GGUFHeader:
    """Read the header of a GGUF file and check that its tensors lie in the file, without overlaps."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ConfigurationError("not a GGUF file: it does not begin with GGUF")
        reader = _Reader(file, min(size, MAX_BYTES))
        version = reader.number("I")
        if version not in VERSIONS:
            raise ConfigurationError(f"GGUF version {version}; versions 2 and 3, little-endian, can be read")
        tensor_count = _bounded("tensors", reader.number("Q"), MAX_TENSORS)
        settings: dict[str, Any] = {}
        for _ in range(_bounded("settings", reader.number("Q"), MAX_SETTINGS)):
            name = reader.text()
            if name in settings:
                raise ConfigurationError(f"the setting {name} appears twice")
            settings[name] = reader.value()
        tensors = [reader.tensor() for _ in range(tensor_count)]
        alignment = settings.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ConfigurationError(f"must be a power of two, got {alignment!r}", key=ALIGNMENT)
        data = size - (file.tell() + -file.tell() % alignment)
    _check_places(tensors, data, alignment, block_sizes)
    return GGUFHeader(settings, tensors)


class _Reader:
    """Reads numbers and text, and never beyond the header's bound."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self.file, self.end, self.elements = file, end, 0

    def bytes(self, count: int) -> bytes:
        left = self.end - self.file.tell()
        if count > left:
            raise ConfigurationError(f"its header needs {count} more bytes and has {max(left, 0)}: truncated")
        return self.file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        with refusing("its header has text that is not UTF-8", UnicodeDecodeError):
            return self.bytes(self.number("Q")).decode()

    def value(self) -> Any:
        kind = self.number("I")
        return self.array() if kind == ARRAY else self.scalar(kind)

    def scalar(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind not in NUMBERS:
            raise ConfigurationError(f"its header has a value of the unknown type {kind}")
        return self.number(NUMBERS[kind])

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        self.elements = _bounded("elements of arrays", self.elements + count, MAX_ELEMENTS)
        if kind not in NUMBERS:
            return [self.scalar(kind) for _ in range(count)]
        form = f"<{count}{NUMBERS[kind]}"
        return list(struct.unpack(form, self.bytes(struct.calcsize(form))))

    def tensor(self) -> GGUFTensor:
        name = self.text()
        dimensions = _bounded(f"dimensions of {name}", self.number("I"), MAX_DIMENSIONS)
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return GGUFTensor(name, shape, self.number("I"), self.number("Q"))


def _bounded(what: str, count: int, limit: int) -> int:
    if count > limit:
        raise ConfigurationError(f"its header says {count} {what}; at most {limit} are read")
    return count


def _check_places(
    tensors: list[GGUFTensor], size: int, alignment: int, block_sizes: Mapping[int, tuple[int, int]]
) -> None:
    """Check types and shapes, and that no two tensors share bytes, which bounds the sum of all sizes."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.kind not in block_sizes:
            raise ConfigurationError(f"the tensor {tensor.name} has the unknown type {tensor.kind}")
        values, length = block_sizes[tensor.kind]
        if not tensor.shape or not tensor.elements or tensor.shape[0] % values:
            needs = f"its type needs a multiple of {values} first, and no zeros"
            raise ConfigurationError(f"the tensor {tensor.name} has the shape {list(tensor.shape)}; {needs}")
        if tensor.offset % alignment or tensor.offset < end:
            raise ConfigurationError(f"the tensor {tensor.name} begins within another, at {tensor.offset}")
        end = tensor.offset + tensor.elements // values * length
        if end > size:
            about = f"ends at byte {end} of the data, of which there are {max(size, 0)}: truncated"
            raise ConfigurationError(f"the tensor {tensor.name} {about}")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ConfigurationError("two tensors have the same name")
