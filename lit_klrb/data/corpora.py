"""Labelled reviews from the embedded world, the hub, a folder or a file: cleaned, split and shuffled."""

import logging
import random
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

from lit_klrb.data.grammar import Review, ReviewGrammar
from lit_klrb.data.tables import READERS, read_rows
from lit_klrb.errors import ConfigurationError
from lit_klrb.seeding import derive_seed

GRAMMAR = "grammar"
ALLOWED = "allowed: grammar, a hub id, a folder of .parquet or .jsonl files, or one such file"
HELD_OUT = ("test", "validation")
CARVED_SHARE = 20  # a held-out split that a source lacks is one in 20 of its train texts
LABELS = {0: 0, 1: 1, -1: None, None: None}  # the hub marks an unknown label with -1

log = logging.getLogger(__name__)


def load_reviews(source: str = GRAMMAR, split: str = "train", size: int = 0, seed: int = 0) -> list[Review]:
    """Reviews of one split, in an order that the seed decides.

    The files of a folder are its splits: `train.parquet`, `test.parquet`; a single file is a train split. For
    a test or validation split that a source lacks, one in 20 of its train texts is set aside, chosen by a
    hash of the text. A text of the test split is dropped from every other split, one of the validation split
    from every split but test; how many were is logged. Texts are cleaned first, see `clean_text`.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file; all but
            the grammar have the column `text` and may have `label` (1 positive, 0 negative, -1 unknown).
        split: "train", "validation", "test", or another one that the source has.
        size: The most reviews to take; 0 for all there are.
        seed: Decides the order; for the grammar, which reviews it writes.

    Raises:
        ConfigurationError: If there is no such source or split, if its columns are not as above, or if all
            reviews of the grammar are asked for: they have no end.

    Example:
        >>> load_reviews("grammar", "test", size=2) == load_reviews("grammar", "test", size=3)[:2]
        True
    """
    if source == GRAMMAR:
        _check_split(source, split, ("train", *HELD_OUT))
        if not size:
            raise _source_error(source, "has no end: a size of 0, all reviews, is allowed for other sources")
        return ReviewGrammar().reviews(size, derive_seed(seed, "corpus", split))
    splits = _load_splits(source)
    _check_split(source, split, [name for name, reviews in splits.items() if reviews])
    reviews = list(splits[split])
    random.Random(derive_seed(seed, "order", split)).shuffle(reviews)
    return reviews[:size] if size else reviews


def clean_text(text: str) -> str:
    r"""Mend what crawling left in a text.

    C1 control characters, which are cp1252 punctuation read as latin-1, become that punctuation; the five
    that cp1252 does not define are removed. A `<br />` tag becomes a newline without spaces around it, or
    nothing at either end of the text.

    Example:
        >>> clean_text("A film\x85 <br /><br />It\x92s good.")
        'A film…\n\nIt’s good.'
    """
    mended = re.sub(r"[\x80-\x9f]", lambda c1: c1[0].encode("latin-1").decode("cp1252", "ignore"), text)
    return "\n".join(line.strip(" ") for line in mended.split("<br />")).strip()


@cache
def _load_splits(source: str) -> dict[str, list[Review]]:
    """Every split of a source, in the source's order, no text in a held-out split and another one."""
    splits = {name: _clean_rows(source, rows) for name, rows in open_splits("source", source).items()}
    for number, name in enumerate(HELD_OUT):
        if "train" in splits and name not in splits:
            chosen = [zlib.crc32(r.text.encode()) % CARVED_SHARE == number for r in splits["train"]]
            splits[name] = list(compress(splits["train"], chosen))
            splits["train"] = list(compress(splits["train"], (not taken for taken in chosen)))
    seen: set[str] = set()
    for name in sorted(splits, key=[*HELD_OUT, *splits].index):
        reviews = splits[name]
        splits[name] = [review for review in reviews if review.text not in seen]
        if dropped := len(reviews) - len(splits[name]):
            log.warning("%s: dropped %d %s reviews that a held-out split has too", source, dropped, name)
        if name in HELD_OUT:
            seen.update(review.text for review in reviews)
    return splits


def open_splits(key: str, source: str) -> Mapping[str, Any]:
    """The data set of each split of a hub id, a folder or a file.

    Args:
        key: The data module's argument that named it, for the error message.
        source: The hub id, the folder, or a .parquet or .jsonl file.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    if not source:
        raise ConfigurationError(f"'' is empty; {ALLOWED}", key=key)
    path = Path(source).expanduser()
    if path.is_dir() and path.suffix not in READERS:
        files = sorted(file for file in path.iterdir() if file.suffix in READERS)
        if not files:
            raise ConfigurationError(f"{source} is a folder without {' or '.join(READERS)} files", key=key)
        return {file.stem: read_rows(key, file) for file in files}
    if path.suffix in READERS or path.exists() or source.startswith((".", "/", "~")):
        return {"train": read_rows(key, path)}
    import datasets  # slow, and only the hub needs it

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"{source} cannot be read ({reason}); {ALLOWED}", key=key) from None


def _clean_rows(source: str, rows: Any) -> list[Review]:
    if "text" not in rows.column_names:
        raise _source_error(source, f"has no column text; its columns: {', '.join(rows.column_names)}")
    texts = rows["text"][:]
    labels = rows["label"][:] if "label" in rows.column_names else [None] * len(texts)
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(text, str) or not _is_unicode(text):
            raise _source_error(source, f"has the text {text!r}; allowed: strings of Unicode characters")
        if label not in list(LABELS):
            raise _source_error(source, f"has the label {label!r}; allowed: 1, 0, and -1 for unknown")
    reviews = [Review(clean_text(text), LABELS[label]) for text, label in zip(texts, labels, strict=True)]
    kept = [review for review in reviews if review.text]
    if len(kept) < len(reviews):
        log.warning("%s: dropped %d empty reviews", source, len(reviews) - len(kept))
    return kept


def _is_unicode(text: str) -> bool:
    """Whether a text holds no half of a surrogate pair: JSON can name one, no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_split(source: str, split: str, allowed: Iterable[str]) -> None:
    if split not in allowed:
        raise _source_error(source, f"has no {split} reviews; allowed: {', '.join(sorted(allowed))}")


def _source_error(source: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{source} {problem}", key="source")
