"""Reading: hub ids, folders and files become rows, by the datasets library; no code of a data set runs."""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path

RawRow = dict[str, Any]
# The library's builder of each kind of file, and its settings; each may be compressed (.gz).
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {"keep_default_na": False, "na_values": [""]}),  # the text "None" is a text
    ".tsv": ("csv", {"keep_default_na": False, "na_values": [""], "sep": "\t"}),
    ".txt": ("text", {}),
}
ALLOWED = f"allowed: grammar, a hub id, a folder, or a file ({', '.join(BUILDERS)}, each also .gz)"
# The maximum size of a file of text, which as Python's objects takes several times the memory.
LARGEST = 2**31


def suffix_of(path: Path) -> str:
    """The suffix of a file that can be read, without .gz; empty for other paths.

    Example:
        >>> suffix_of(Path("train.jsonl.gz")), suffix_of(Path("model.ckpt"))
        ('.jsonl', '')
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in BUILDERS else ""


def open_splits(key: str, source: str, subset: str | None = None) -> Mapping[str, Sequence[RawRow]]:
    """Open a hub id, a folder or a file as the rows of each split.

    The files of a folder are its splits, shards (`train-00000-of-00002.parquet`) parts of one; a single file
    is the train split. Folders of `save_to_disk` are read, too.
    """
    if not source:
        raise ConfigurationError(f"'' is empty; {ALLOWED}", key=key)
    path = local_path(source, key)
    if not path.exists() and (suffix_of(path) or source.startswith((".", "/", "~"))):
        raise ConfigurationError(f"{source} does not exist", key=key)
    if path.is_dir():
        return _open_folder(key, path / subset if subset else path)
    if path.exists():
        if subset is not None:
            raise ConfigurationError(
                f"{subset} is for hub ids and folders, but {source} is neither", key="subset"
            )
        return {"train": read_files(key, [path])}
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
        parts: dict[str, list[Path]] = {}
        for file in sorted(place.iterdir()):
            if suffix_of(file):
                name = Path(file.name.removesuffix(".gz")).stem
                parts.setdefault(re.sub(r"-\d+-of-\d+$", "", name), []).append(file)
        if parts:
            return _Files(key, parts)
    others = sorted(place.name for place in inside[0].iterdir() if place.is_dir()) if inside else []
    hint = f"; its subsets: {', '.join(others[:9])}" if others else ""
    raise ConfigurationError(f"{folder} is a folder without files that can be read{hint}; {ALLOWED}", key=key)


class _Files(Mapping[str, Sequence[RawRow]]):
    """The splits of a folder, of which each is read when it is asked for."""

    def __init__(self, key: str, files: dict[str, list[Path]]) -> None:
        self.key, self.files = key, files

    def __getitem__(self, split: str) -> list[RawRow]:
        return read_files(self.key, self.files[split])

    def __iter__(self) -> Any:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def read_files(key: str, files: Sequence[Path]) -> list[RawRow]:
    """The rows of files, in order.

    Raises:
        ConfigurationError: If one cannot be read; names it.
    """
    import datasets

    rows: list[RawRow] = []
    for file in files:
        if not suffix_of(file) or not file.is_file():
            raise ConfigurationError(f"{file} is not a file that can be read; {ALLOWED}", key=key)
        builder, settings = BUILDERS[suffix_of(file)]
        if builder != "parquet" and (size := file.stat().st_size) > LARGEST:
            problem = f"it has {size} bytes; at most {LARGEST} are read, and more from .parquet files"
            raise ConfigurationError(f"{file} cannot be read: {problem}", key=key)
        said, logger = logging.CRITICAL, logging.getLogger("datasets")
        before, logger.level = logger.level, said  # it logs what it raises
        try:
            with refusing(f"{file} cannot be read", key=key):
                try:
                    # Streamed: nothing is written to a cache, which a changed file would outdate
                    files_of_builder = {"train": str(file)}
                    stream = datasets.load_dataset(
                        builder, data_files=files_of_builder, split="train", streaming=True, **settings
                    )
                    rows += [_plain(row) for row in stream]
                except (StopIteration, datasets.exceptions.DatasetGenerationError) as error:
                    if file.stat().st_size:
                        raise ValueError(str(error.__cause__ or error) or "it has no rows") from error
        finally:
            logger.level = before
    return rows


def _plain(row: RawRow) -> RawRow:
    """A row whose texts that look like times are texts again."""
    return {name: str(value) if isinstance(value, (date, datetime)) else value for name, value in row.items()}
