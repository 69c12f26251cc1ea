"""Reading: hub ids, folders and files become rows; no code of a data set runs.

The datasets library reads what has types. Of JSON and of tables in text it guesses them, which would change
"2020-01-01" and "007": their strings and cells are read as they stand.
"""

import gzip
import json
import logging
import re
import shutil
import tempfile
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, TextIO

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path

RawRow = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt")
ALLOWED = f"allowed: grammar, a hub id, a folder, or a file ({', '.join(SUFFIXES)}, each also .gz)"
# The maximum size of a file of text, which as Python's objects takes several times the memory.
LARGEST = 2**31
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
    """Open a hub id, a folder or a file as the rows of each split.

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
        raise ConfigurationError(
            f"{subset} is for hub ids and folders, but {source} is neither", key="subset"
        )
    if path.exists():
        return {"train": read_files(key, [path])}
    if suffix_of(path) or source.startswith((".", "/", "~")):
        raise ConfigurationError(f"{source} does not exist", key=key)
    import datasets  # slow to import

    datasets.disable_progress_bars()
    with refusing(f"{source} cannot be read; {ALLOWED}", key=key):
        found: Mapping[str, Any] = datasets.load_dataset(source, subset)
    return found


def _open_folder(key: str, folder: Path) -> Mapping[str, Sequence[RawRow]]:
    if any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        import datasets

        with refusing(f"{folder} cannot be read", key=key):
            saved: Any = datasets.load_from_disk(str(folder))
        return saved if isinstance(saved, Mapping) else {"train": saved}
    inside = [place for place in (folder, folder / "data") if place.is_dir()]
    for place in inside:
        splits = _Files(key)
        for file in filter(suffix_of, sorted(place.iterdir())):
            name = re.sub(r"-\d+-of-\d+(-[0-9a-f]+)?$", "", Path(file.name.removesuffix(".gz")).stem)
            splits.data.setdefault(name, []).append(file)
        folders = [sub for sub in sorted(place.iterdir()) if sub.is_dir()]
        if any(sub.name.startswith("train") for sub in folders):
            for file in (file for sub in folders for file in sorted(sub.iterdir()) if suffix_of(file)):
                splits.data.setdefault(file.parent.name, []).append(file)
        if splits:
            return splits
    others = sorted(place.name for place in inside[0].iterdir() if place.is_dir()) if inside else []
    hint = f"; its subsets: {', '.join(others[:9])}" if others else ""
    raise ConfigurationError(f"{folder} is a folder without files that can be read{hint}; {ALLOWED}", key=key)


class _Files(UserDict[str, Any]):
    """The files of each split of a folder, which are read when it is asked for."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def __getitem__(self, split: str) -> list[RawRow]:
        files = self.data[split]
        stems = [Path(file.name.removesuffix(".gz")).stem for file in files]
        if len(files) > 1 and (split in stems or len(set(stems)) < len(stems)):
            given = f"{files[0].parent}: {files[0].name} and {files[-1].name}"
            problem = "are the same split, whose rows would be read twice; keep one of them"
            raise ConfigurationError(f"{given} {problem}", key=self.key)
        return read_files(self.key, files)


def read_files(key: str, files: Sequence[Path]) -> list[RawRow]:
    """The rows of files, in order."""
    rows: list[RawRow] = []
    logger = logging.getLogger("datasets")
    before = logger.level
    for file in files:
        if not suffix_of(file) or not file.is_file():
            raise ConfigurationError(f"{file} is not a file that can be read; {ALLOWED}", key=key)
        if suffix_of(file) != ".parquet" and (size := file.stat().st_size) > LARGEST:
            problem = f"it has {size} bytes; at most {LARGEST} are read, and more from .parquet files"
            raise ConfigurationError(f"{file} cannot be read: {problem}", key=key)
        logger.setLevel(logging.CRITICAL)  # it logs what it raises
        try:
            with refusing(f"{file} cannot be read", key=key):
                rows += _rows_of(file)
        finally:
            logger.setLevel(before)
    return rows


def _rows_of(file: Path) -> list[RawRow]:
    match suffix_of(file):
        case ".jsonl" | ".json":
            return _json_rows(file)
        case ".csv" | ".tsv":
            return _cells(file)
        case ".parquet" if file.name.endswith(".gz"):  # which the library does not unpack
            with tempfile.NamedTemporaryFile(suffix=".parquet") as plain, gzip.open(file) as packed:
                shutil.copyfileobj(packed, plain)
                plain.flush()
                return _typed_rows(Path(plain.name), "parquet")
        case suffix:
            return _typed_rows(file, "parquet" if suffix == ".parquet" else "text")


def _typed_rows(file: Path, builder: str) -> list[RawRow]:
    """The rows of a table with types, whose times become texts, or the lines of a text."""
    import datasets

    # Streamed: nothing is written to a cache, which a changed file would outdate
    options = {"data_files": {"train": str(file)}, "split": "train", "streaming": True}
    try:
        rows = list(datasets.load_dataset(builder, **options))
    except (StopIteration, datasets.exceptions.DatasetGenerationError) as error:
        if not file.stat().st_size:
            return []
        raise ValueError(str(error.__cause__ or error) or "it has no rows") from error
    times = (date, datetime)
    return [
        {k: str(value) if isinstance(value, times) else value for k, value in row.items()} for row in rows
    ]


def _json_rows(file: Path) -> list[RawRow]:
    """The objects of JSON lines or of an array, with the same columns."""
    with _opened(file) as text:
        rows = list(_json_values(text))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {type(row).__name__}; an object with columns is expected")
    names = dict.fromkeys(name for row in rows for name in row)
    return [row if len(row) == len(names) else {name: row.get(name) for name in names} for row in rows]


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
        # Escapes can be half of a surrogate pair, which no tokenizer encodes
        if re.search(r"\\ud[89a-f]", line, re.IGNORECASE):
            json.dumps(value, ensure_ascii=False).encode()
        yield from value if is_first and isinstance(value, list) else [value]
        is_first = False


def _cells(file: Path) -> list[RawRow]:
    """The rows of a table in text, whose cells are texts; empty ones are None."""
    import pandas  # slow to import

    sep = "\t" if suffix_of(file) == ".tsv" else ","
    try:  # the text "None" is a text
        table = pandas.read_csv(file, sep=sep, dtype=object, keep_default_na=False, na_values=[""])
    except pandas.errors.EmptyDataError:
        if not file.stat().st_size:
            return []
        raise
    rows: list[RawRow] = table.where(table.notna(), None).to_dict("records")
    if sep == "\t":  # in which quotes may be no more than that
        with _opened(file) as text:
            lines = sum(bool(line.strip()) for line in text) - 1
        if lines > len(rows):
            log.warning(f"{file}: {lines} lines are {len(rows)} rows, as quotes join lines")
    return rows


def _opened(file: Path) -> TextIO:
    opened: Any = gzip.open if file.name.endswith(".gz") else open
    text: TextIO = opened(file, "rt", encoding="utf-8-sig")
    return text
