"""Loading, cleaning and splitting of reviews from the embedded world, the hub, a folder or a file."""

import logging
import random
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

from lit_klrb.data.chat import Conversation, is_unicode
from lit_klrb.data.grammar import Review, ReviewGrammar
from lit_klrb.data.tables import CONVERSIONS, READERS, read_rows
from lit_klrb.errors import ConfigurationError, concerning
from lit_klrb.files import local_path
from lit_klrb.seeding import derive_seed

GRAMMAR = "grammar"
TEXT, PROMPT, MESSAGES = "text", "prompt", "messages"
# The column with what the teacher, or the reference, reads instead of the prompt.
TEACHER_PROMPT = "teacher_prompt"
ALLOWED = "allowed: grammar, a hub id, a folder of .parquet or .jsonl files, or one such file"
HELD_OUT = ("test", "validation")
HELD_OUT_EVERY = 20  # one in 20 train texts is held out for a split that the source lacks
LABELS = {0: 0, 1: 1, -1: None, None: None}  # on the hub, -1 marks an unknown label

log = logging.getLogger(__name__)
T = TypeVar("T")


def load_reviews(
    source: str = GRAMMAR,
    split: str = "train",
    size: int = 0,
    columns: tuple[str, ...] = (TEXT,),
) -> list[Review]:
    """Load the reviews of a split, shuffled.

    The files of a folder are its splits (`train.parquet`, `test.parquet`); a single file is a train split. If
    a source has no test or validation split, one in 20 train texts is held out for it, chosen by a hash of
    the text. Texts of the test split are removed from all other splits, and texts of the validation split
    from all splits but test; their number is logged. Texts are cleaned first, see `clean_text`.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file. All but
            the grammar need the column `text` and may have `label` (1 positive, 0 negative, -1 unknown).
        split: "train", "validation", "test", or another split of the source.
        size: Maximum number of reviews; 0 for all.
        columns: Names of the column with the texts, of which the first that exists is read. Those of the
            column `prompt` are prompts to be used as a whole; they are texts or conversations, and those of
            the column `messages` conversations. With `prompt` among the names, all keep the other columns.

    Raises:
        ConfigurationError: If the source or split does not exist, if a column is missing or has wrong values,
            or if `size` is 0 for the grammar, whose reviews are unlimited.

    Example:
        >>> load_reviews("grammar", "test", size=2) == load_reviews("grammar", "test", size=3)[:2]
        True
    """
    if source == GRAMMAR:
        _check_split(source, split, ("train", *HELD_OUT))
        if not size:
            raise _source_error(
                source, "is unlimited: a size of 0 (all reviews) is allowed for other sources"
            )
        return ReviewGrammar().reviews(size, derive_seed(0, "corpus", split))
    return pick(source, _load_splits(source, columns), split, size)


def given_prompts(source: str, columns: tuple[str, ...]) -> list[Review] | None:
    """All prompts of a single file, in its order; None if it is no file, or has texts instead of prompts.

    Args:
        source: See `load_reviews`.
        columns: See `load_reviews`.

    Raises:
        ConfigurationError: If the file cannot be read, or has wrong values.
    """
    if not local_path(source, "source").is_file():
        return None
    rows = open_splits("source", source)["train"]
    column = next((name for name in columns if name in rows.column_names), TEXT)
    prompts = [] if column == TEXT else _clean_rows(source, rows, columns, source)
    return prompts or None


def pick(source: str, splits: Mapping[str, Sequence[T]], split: str, size: int) -> list[T]:
    """One split of a source, shuffled.

    Args:
        source: The source, for the error message.
        splits: Its splits.
        split: Name of the split.
        size: Maximum number of examples; 0 for all.

    Raises:
        ConfigurationError: If there is no such split, or it is empty.
    """
    _check_split(source, split, [name for name, examples in splits.items() if examples])
    examples = list(splits[split])
    random.Random(derive_seed(0, "order", split)).shuffle(examples)
    return examples[:size] if size else examples


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


@cache
def _load_splits(source: str, columns: tuple[str, ...]) -> dict[str, list[Review]]:
    """All splits of a source, in its order; texts of held-out splits are removed from the others."""
    opened = open_splits("source", source)
    splits = {
        name: _clean_rows(source, rows, columns, source if len(opened) == 1 else f"{source}: {name}")
        for name, rows in opened.items()
    }
    return hold_out(source, splits, lambda review: review.text)


def hold_out(source: str, given: Mapping[str, list[T]], identity: Callable[[T], str]) -> dict[str, list[T]]:
    """Hold out examples for missing splits, and remove examples of held-out splits from the others.

    Args:
        source: The source, for the log.
        given: Its splits.
        identity: The text by which an example is chosen and recognised.
    """
    splits = dict(given)
    for number, name in enumerate(HELD_OUT):
        if "train" in splits and name not in splits:
            held_out = [zlib.crc32(identity(e).encode()) % HELD_OUT_EVERY == number for e in splits["train"]]
            splits[name] = list(compress(splits["train"], held_out))
            splits["train"] = list(compress(splits["train"], (not chosen for chosen in held_out)))
    seen: set[str] = set()
    for name in sorted(splits, key=[*HELD_OUT, *splits].index):
        examples = splits[name]
        splits[name] = [example for example in examples if identity(example) not in seen]
        if splits[name] and (dropped := len(examples) - len(splits[name])):
            log.warning("%s: dropped %d %s reviews that are also in a held-out split", source, dropped, name)
        if name in HELD_OUT:
            seen.update(map(identity, examples))
    return splits


def open_splits(key: str, source: str) -> Mapping[str, Any]:
    """Open a hub id, a folder or a file as one data set per split.

    Args:
        key: The data module's argument that names it, for the error message.
        source: The hub id, the folder, or a .parquet or .jsonl file.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    if not source:
        raise ConfigurationError(f"'' is empty; {ALLOWED}", key=key)
    path = local_path(source, key)
    if path.is_dir() and path.suffix not in READERS:
        files = sorted(file for file in path.iterdir() if file.suffix in READERS)
        if not files:
            raise ConfigurationError(f"{source} is a folder without {' or '.join(READERS)} files", key=key)
        return {file.stem: read_rows(key, file) for file in files}
    is_file = path.suffix in READERS or path.suffix.lower() in CONVERSIONS
    if is_file or path.exists() or source.startswith((".", "/", "~")):
        return {"train": read_rows(key, path)}
    import datasets  # slow to import, and needed for the hub only

    datasets.disable_progress_bars()
    kinds = OSError, ValueError, datasets.exceptions.DatasetsError
    with concerning(f"{source} cannot be read; {ALLOWED}", *kinds, key=key):
        return datasets.load_dataset(source)


def _clean_rows(source: str, rows: Any, columns: tuple[str, ...], place: str) -> list[Review]:
    column = next((name for name in columns if name in rows.column_names), None)
    if column is None:
        given = ", ".join(rows.column_names)
        wanted = " or ".join(columns)
        raise _source_error(
            source, f"has no column {wanted}; its columns: {given}" if given else "has no rows"
        )
    texts = rows[column][:]
    if column == MESSAGES or (column == PROMPT and any(isinstance(text, list) for text in texts)):
        return _conversations(rows, column, place)
    labels = rows["label"][:] if "label" in rows.column_names else [None] * len(texts)
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(text, str) or not is_unicode(text):
            hint = "; conversations belong in the column messages" if isinstance(text, list) else ""
            raise _source_error(
                source, f"has the {column} {text!r:.80}; allowed: strings of Unicode characters{hint}"
            )
        if column == TEXT and label not in list(LABELS):
            raise _source_error(source, f"has the label {label!r}; allowed: 1, 0, and -1 for unknown")
    # Only prompts are rated, and a hub's columns can be large
    others = _other_columns(rows, column) if PROMPT in columns else [{}] * len(texts)
    # Prompts are used as they are, and never rated by their own label
    reviews = [
        Review(text, None, is_prompt=True, columns=other)
        if column == PROMPT
        else Review(clean_text(text), LABELS[label], columns=other)
        for text, label, other in zip(texts, labels, others, strict=True)
    ]
    kept = [review for review in reviews if review.text]
    if 0 < len(kept) < len(reviews):
        log.warning("%s: dropped %d empty reviews", source, len(reviews) - len(kept))
    return kept


def _conversations(rows: Any, column: str, place: str) -> list[Review]:
    """The rows of a column of conversations; a text among them is refused."""
    reviews, others = [], _other_columns(rows, column)
    for number, (value, other) in enumerate(zip(rows[column][:], others, strict=True), 1):
        chat = Conversation.read("source", f"{place} row {number}", value)
        reviews.append(Review(chat.identity(), None, column == PROMPT, other, chat))
    return reviews


def _other_columns(rows: Any, column: str) -> Sequence[Mapping[str, Any]]:
    """The other columns of each row."""
    others = {name: rows[name][:] for name in rows.column_names if name != column}
    return [{name: others[name][row] for name in others} for row in range(len(rows))]


def _check_split(source: str, split: str, allowed: Iterable[str]) -> None:
    if split not in allowed:
        names = ", ".join(sorted(allowed)) or "none"
        folder = "; the files of a folder are its splits, such as train.jsonl and test.jsonl"
        file = f"; of a single file, one text in {HELD_OUT_EVERY} is held out for it"
        path = Path(source).expanduser()
        hint = folder if path.is_dir() else file if path.is_file() else ""
        raise _source_error(source, f"has no {split} split with texts; its splits: {names}{hint}")


def _source_error(source: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{source} {problem}", key="source")
