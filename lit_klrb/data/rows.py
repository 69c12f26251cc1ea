"""Reading: hub ids, folders and files become rows; no code of a data set runs.

Strings of JSON and cells of tables in text are read as they stand: "2020-01-01" and "007" are texts. Tables
with types stay as they are stored, and rows are taken from them one by one, as there may be millions.
"""

import csv
import gzip
import json
import logging
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TextIO

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path

RawRow = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt")
ALLOWED = f"allowed: grammar, a hub id, a folder, or a file ({', '.join(SUFFIXES)}, each also .gz)"
# Between the cells of tables in text
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
log = logging.getLogger(__name__)


def suffix_of(path: Path) -> str:
    """The suffix of a file that can be read, without .gz; empty for other paths.

    Example:
        >>> suffix_of(Path("train.jsonl.gz")), suffix_of(Path("model.ckpt"))
        ('.jsonl', '')
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def open_splits(key: str, source: str, subset: str | None = None) -> Mapping[str, Sequence[RawRow]]:
    """Open a hub id, a folder or a file as the rows of each split, files when a row is asked for.

    The files of a folder are its splits, shards (`train-00000-of-00002.parquet`, of old data sets with a hash
    behind it) parts of one, as are the files of a folder `train` in it; a single file is the train split.
    Folders of `save_to_disk` are read, too.
    """
    if not source:
        raise ConfigurationError(f"'' is empty; {ALLOWED}", key=key)
    path = local_path(source, key)
    if path.is_dir():
        return _open_folder(key, path / subset if subset else path)
    if path.exists() and subset is not None:
        problem = f"{subset} is for hub ids and folders, but {source} is neither"
        raise ConfigurationError(problem, key="subset")
    if path.exists():
        return {"train": Table(key, [path])}
    if suffix_of(path) or source.startswith((".", "/", "~")):
        raise ConfigurationError(f"{source} does not exist", key=key)
    import datasets  # slow to import

    datasets.disable_progress_bars()
    with refusing(f"{source} cannot be read; {ALLOWED}", key=key):
        splits: Mapping[str, Any] = datasets.load_dataset(source, subset)
    return splits


def _open_folder(key: str, folder: Path) -> Mapping[str, Sequence[RawRow]]:
    if any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        import datasets

        with refusing(f"{folder} cannot be read", key=key):
            saved: Any = datasets.load_from_disk(str(folder))
        return saved if isinstance(saved, Mapping) else {"train": saved}
    parents = [parent for parent in (folder, folder / "data") if parent.is_dir()]
    for parent in parents:
        files = defaultdict[str, list[Path]](list)
        for file in filter(suffix_of, sorted(parent.iterdir())):
            files[re.sub(r"-\d+-of-\d+(-[0-9a-f]+)?$", "", _stem(file))].append(file)
        folders = [child for child in sorted(parent.iterdir()) if child.is_dir()]
        if any(child.name.startswith("train") for child in folders):
            for file in (file for child in folders for file in sorted(child.iterdir()) if suffix_of(file)):
                files[file.parent.name].append(file)
        if files:
            return {split: Table(key, shards, split) for split, shards in files.items()}
    others = sorted(child.name for child in parents[0].iterdir() if child.is_dir()) if parents else []
    hint = f"; its subsets: {', '.join(others[:9])}" if others else ""
    raise ConfigurationError(f"{folder} is a folder without files that can be read{hint}; {ALLOWED}", key=key)


def _stem(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).stem


class Table(Sequence[RawRow]):
    """The rows of files, in order: lists of rows, or batches of Arrow's, whose times become texts.

    Args:
        key: The argument that names the files.
        files: They are read when a row is asked for.
        split: The name of the split whose shards they are.
    """

    def __init__(self, key: str, files: Sequence[Path], split: str = "") -> None:
        self.key, self.files, self.split = key, files, split

    @cached_property
    def parts(self) -> list[Any]:
        """The parts."""
        stems = [*map(_stem, self.files)]
        if len(stems) > 1 and (self.split in stems or len(set(stems)) < len(stems)):
            names = f"{self.files[0].parent}: {self.files[0].name} and {self.files[-1].name}"
            problem = "are the same split, whose rows would be read twice; keep one of them"
            raise ConfigurationError(f"{names} {problem}", key=self.key)
        return [part for file in self.files for part in _parts_of(self.key, file)]

    @cached_property
    def starts(self) -> list[int]:
        """Number of the first row of each part, and that of all rows."""
        return [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect_right(self.starts, index) - 1
        first = index - self.starts[part]
        return next(_rows_of(self.parts[part][first : first + 1]))

    def __iter__(self) -> Iterator[RawRow]:
        return chain.from_iterable(map(_rows_of, self.parts))


def _rows_of(part: Any) -> Iterator[RawRow]:
    if isinstance(part, list):
        yield from part
        return
    for first in range(0, len(part), 1000):
        for row in part[first : first + 1000].to_pylist():
            yield {name: str(v) if isinstance(v, (date, datetime)) else v for name, v in row.items()}


def _parts_of(key: str, file: Path) -> Sequence[Any]:
    """The rows of a file, in one list, or in the batches of a table with types."""
    if not suffix_of(file) or not file.is_file():
        raise ConfigurationError(f"{file} is not a file that can be read; {ALLOWED}", key=key)
    parts: Sequence[Any] = []
    with refusing(f"{file} cannot be read", key=key):
        try:
            parts = _read(file)
        except UnicodeDecodeError as error:
            name = "utf-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
            remedy = f"iconv -f {name} -t utf-8 {file.name} > new{suffix_of(file)}"
            raise ValueError(f"it is not encoded in UTF-8; if it is {name}: {remedy}") from error
    return parts


def _read(file: Path) -> Sequence[Any]:
    """The parts of a file, by its suffix."""
    match suffix_of(file):
        case ".jsonl" | ".json":
            return [_json_rows(file)]
        case ".csv" | ".tsv":
            return [_cells(file)]
        case ".txt":
            with _opened(file) as text:
                return [[{"text": line.removesuffix("\n")} for line in text]]
    import pyarrow  # slow to import
    from pyarrow import parquet

    packed = file.name.endswith(".gz")
    if not file.stat().st_size:
        return []
    content = pyarrow.BufferReader(gzip.decompress(file.read_bytes())) if packed else file
    return list(parquet.ParquetFile(content).iter_batches())


def _json_rows(file: Path) -> list[RawRow]:
    """The objects of JSON lines or of an array."""
    with _opened(file) as text:
        rows = list(_json_values(text))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {type(row).__name__}; an object with columns is expected")
    return rows


def _json_values(text: TextIO) -> Iterator[Any]:
    """The value of each line, or those of the array that begins with the first."""
    is_first = True
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if not is_first:
                raise ValueError(f"line {number}: {error.msg}") from error
            line += text.read()
            value = json.loads(line)  # of several lines
        yield from value if is_first and isinstance(value, list) else [value]
        is_first = False


def _cells(file: Path) -> list[RawRow]:
    """The rows of a table in text, whose cells are texts; empty ones are None."""
    usual = "\t" if suffix_of(file) == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)
    with _opened(file, newline="") as text:
        header = text.readline()
        sep = usual if usual in header else next((other for other in SEPARATORS if other in header), usual)
        text.seek(0)
        # Quotes may be no more than that in .tsv
        reader = csv.reader(text, delimiter=sep, strict=usual == ",")
        names, rows = [*map(str.strip, next(reader, []))], list[RawRow]()
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise ValueError(f"the header has {twice} twice")
        try:
            for cells in filter(None, reader):
                if any(cells[len(names) :]):
                    raise csv.Error(f"{len(cells)} cells, but the header has {len(names)}")
                padded = (cell or None for cell in (*cells, *[""] * len(names)))
                rows.append(dict(zip(names, padded, strict=False)))
        except csv.Error as error:
            quotes = f"a cell with {SEPARATORS[sep]} in it needs quotes"
            raise ValueError(f"line {reader.line_num}: {error}; {quotes}") from error
    if sep != usual:
        log.warning("%s: cells are separated by %s", file, SEPARATORS[sep])
    if usual == "\t":
        with _opened(file) as text:
            lines = sum(bool(line.strip()) for line in text) - 1
        if lines > len(rows):
            log.warning(f"{file}: {lines} lines are {len(rows)} rows, as quotes join lines")
    return rows


def _opened(file: Path, **settings: Any) -> TextIO:
    opened: Any = gzip.open if file.name.endswith(".gz") else open
    text: TextIO = opened(file, "rt", encoding="utf-8-sig", **settings)
    return text


def clean_text(text: str) -> str:
    r"""Repair artifacts of web crawling in a text.

    C1 control characters, which are cp1252 punctuation decoded as latin-1, are replaced by that punctuation;
    the five that cp1252 does not define are removed. `<br />` tags and the spaces around them become
    newlines, except at the start and the end of the text, where they are removed.

    Example:
        >>> clean_text("A film\x85 <br /><br />It\x92s good.")
        'A film…\n\nIt’s good.'
    """
    repaired = re.sub(r"[\x80-\x9f]", lambda c1: c1[0].encode("latin-1").decode("cp1252", "ignore"), text)
    return "\n".join(line.strip(" ") for line in repaired.split("<br />")).strip()
