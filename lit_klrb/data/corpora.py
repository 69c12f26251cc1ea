"""Loading and splitting of rows from the embedded world, the hub, a folder or a file."""

import hashlib
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_klrb.data.columns import Want
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row, parse_row, say
from lit_klrb.data.prompts import grammar_pairs
from lit_klrb.data.rows import RawRow, open_splits
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path
from lit_klrb.seeding import derive_seed

KEY, GRAMMAR = "source", "grammar"
HELD_OUT = ("test", "validation")
HELD_OUT_EVERY = 20  # one in 20 train rows is held out for a split that the source lacks
log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where rows come from, and what is read of each: see the arguments of `CorpusDataModule`."""

    name: str = GRAMMAR
    want: Want = "texts"
    subset: str | None = None
    train: str = "train"
    evaluation: str | None = None
    columns: tuple[tuple[str, str | None], ...] = ()
    key: str = KEY  # the argument that names it
    splits: bool = True  # whether rows are held out of the training split


class Drawn(NamedTuple):
    """Rows of a split, in random order."""

    rows: list[Row]
    total: int | None = None  # how many rows there are; None if these are all


def draw(source: Source | str = GRAMMAR, split: str = "train", size: int = 0) -> Drawn:
    """Rows of a split, drawn at random: a fixed shuffle. A size of 0 is for all.

    If a source has no test or validation split, one in 20 train rows is held out for it, and at least one,
    chosen by a hash of the prompt or of the text. Rows of the test split are removed from all other splits,
    and those of the validation split from all splits but test; their number is logged.

    Example:
        >>> draw("grammar", "test", size=2).rows == draw("grammar", "test", size=3).rows[:2]
        True
    """
    source = Source(source) if isinstance(source, str) else source
    if source.name != GRAMMAR:
        return _corpus(source).draw(split, size)
    if split not in (splits := ("train", *HELD_OUT)):
        raise _no_split(source, split, splits)
    if not size:
        raise _error(source, "is unlimited: a size of 0 (all rows) is allowed for other sources")
    if source.want == "preferences":
        return Drawn(grammar_pairs(split, size))
    reviews = ReviewGrammar().reviews(size, derive_seed(0, "corpus", split))
    return Drawn([Row(None, (review.text,), review.label) for review in reviews])


def load_rows(source: Source | str = GRAMMAR, split: str = "train", size: int = 0) -> list[Row]:
    """The rows of `draw`."""
    return draw(source, split, size).rows


def held_out_prompts(source: Source, size: int) -> set[str]:
    """The first given prompts that `draw` draws of the test and the validation split, as in `Row.text`.

    None if they are the beginnings of texts.
    """
    corpus = None if source.name == GRAMMAR else _corpus(source)
    rows = (row for name in HELD_OUT if corpus for row in islice(corpus.walk(name), size))
    return {row.text for row in rows if row.prompt is not None}


def given_prompts(source: Source) -> list[Row]:
    """All prompts of a single file, in its order; none if it is no file, or has texts instead of prompts."""
    if not local_path(source.name, KEY).is_file():
        return []
    rows = enumerate(open_splits(KEY, source.name)["train"], 1)
    columns = dict(source.columns)
    prompts = [parse_row(row, "prompts", f"{source.name} row {n}", columns) for n, row in rows]
    say(source.name, prompts)
    return prompts if any(row.prompt is not None for row in prompts) else []


class Corpus:
    """The splits of a source, whose rows are parsed when they are drawn, as there may be millions."""

    def __init__(self, source: Source) -> None:
        self.source, self.parts = source, source.train.split("+")
        self.tables = open_splits(source.key, source.name, source.subset)
        self.said = set[str]()
        self._identities = dict[str, set[str]]()
        held_out = HELD_OUT if source.splits else ()
        # What each split is called in the source
        self.names = {name: name for name in (*self.parts, *held_out) if name in self.tables}
        if source.evaluation is not None:
            self.names |= dict.fromkeys(held_out, source.evaluation)
        missing = [name for name in self.names.values() if name not in self.tables]
        if missing or not self.names:
            problem = f"has no split {[*missing, self.parts[0]][0]}"
            hint = "" if missing else f"; choose with split{', eval_split' if source.splits else ''}"
            splits = ", ".join(sorted(self.tables)) or "none"
            raise _error(source, f"{problem}; its splits: {splits}{hint}")
        # Splits that the source lacks; for each the only row held out, by its identity, or None: by a hash
        self.carved = dict[str, str | None]()
        for name in held_out:
            if self.parts[0] in self.names and name not in self.names:
                self.carved[name] = self._only_row(name)

    def draw(self, split: str, size: int) -> Drawn:
        """See `draw`."""
        if missing := [part for part in self.parts if split == "train" and part not in self.names]:
            raise self._no_rows(missing[0])
        dropped = Counter[str]()
        walk = self.walk(split, dropped)
        rows = list(islice(walk, size or None))
        is_all = next(walk, None) is None
        if not rows:
            raise self._no_rows(split)
        for part, count in dropped.items():
            about = f"{self.source.name}: dropped {count} {part} rows"
            log.warning(f"{about} that are also in a held-out split")
        say(self.source.name, rows, self.said)
        return Drawn(rows, None if is_all else sum(len(self.tables[name]) for _, name in self._tables(split)))

    def walk(self, split: str, dropped: Counter[str] | None = None) -> Iterator[Row]:
        """The rows of a split in random order, without those of held-out splits, which are counted."""
        before = HELD_OUT[: HELD_OUT.index(split)] if split in HELD_OUT else HELD_OUT
        same = split == "validation" and self.source.evaluation is not None
        seen = {i for name in before if name in self.names and not same for i in self._ids(name)}
        tables, first = self._tables(split), self.parts[0]
        # Those of another part are held out with the rows of the first that are
        others = {i for i in self._ids(first) if self._holder(i)} if len(tables) > 1 else seen
        for part, row in self._shuffled(tables, split):
            identity = _identity(row)
            if part == first and self._holder(identity) != (split if split in self.carved else None):
                continue
            if not identity or not (identity in seen or (part != first and identity in others)):
                yield row
            elif dropped is not None:
                dropped[part if split == "train" else split] += 1

    def _tables(self, split: str) -> list[tuple[str, str]]:
        """The parts of a split, by their name and that of their table."""
        parts = self.parts if split == "train" else self.parts[:1] if split in self.carved else [split]
        return [(part, self.names[part]) for part in parts if part in self.names]

    def _shuffled(self, tables: Sequence[tuple[str, str]], split: str) -> Iterator[tuple[str, Row]]:
        total = sum(len(self.tables[name]) for _, name in tables)
        order = np.random.default_rng(derive_seed(0, "order", split)).permutation(total)
        for index in map(int, order):
            for part, name in tables:
                if index < len(self.tables[name]):
                    yield part, self._row(name, index, self.tables[name][index])
                    break
                index -= len(self.tables[name])

    def _row(self, name: str, index: int, raw: RawRow) -> Row:
        table = self.source.name if len(self.tables) == 1 else f"{self.source.name}: {name}"
        return parse_row(raw, self.source.want, f"{table} row {index + 1}", dict(self.source.columns))

    def _each_identity(self, part: str) -> Iterator[str]:
        name = self.names[part]
        return (_identity(self._row(name, index, raw)) for index, raw in enumerate(self.tables[name]))

    def _ids(self, part: str) -> set[str]:
        """What identifies the rows of a part, all of which this reads."""
        if (name := self.names[part]) not in self._identities:
            self._identities[name] = set(self._each_identity(part))
        return self._identities[name]

    def _holder(self, identity: str) -> str | None:
        """The split for which a row of the first part is held out."""
        for name, only in self.carved.items() if identity else ():
            if identity == only or (only is None and _is_chosen(identity, name)):
                return name
        return None

    def _only_row(self, split: str) -> str | None:
        """The row to hold out if the hash chooses none, by its identity; empty if too few would be left."""
        others = dict[int, str]()
        for identity in self._each_identity(self.parts[0]):
            if identity and not self._holder(identity):
                if _is_chosen(identity, split):
                    return None
                others[zlib.crc32(identity.encode())] = identity
        # At least one, and one is left
        return others[min(others)] if len(others) > len(HELD_OUT) - HELD_OUT.index(split) else ""

    def _no_rows(self, split: str) -> ConfigurationError:
        names = [name for name in (*self.names, *self.carved) if next(self.walk(name), None) is not None]
        different = {identity for part in self.names for identity in self._ids(part)}
        return _no_split(self.source, split, names, len(different))


_corpus = cache(Corpus)


def _identity(row: Row) -> str:
    """What rows of the same prompt have in common; a row without one is on its own. Empty of empty rows."""
    if not any((row.prompt, *row.answers)):
        return ""
    if row.prompt is None or not row.answers:
        return row.text
    # Its CRC-32 decides the split, and is far from uniform over short texts that differ in a digit
    return hashlib.sha256((row.text or str(row.answers[0])).encode()).hexdigest()


def _is_chosen(identity: str, split: str) -> bool:
    """Whether a hash holds a row out for a split."""
    return zlib.crc32(identity.encode()) % HELD_OUT_EVERY == HELD_OUT.index(split)


def _no_split(source: Source, split: str, splits: Iterable[str], different: int = 0) -> ConfigurationError:
    path, hint = Path(source.name).expanduser(), ""
    if path.is_dir():
        hint = "; the files of a folder are its splits, such as train.jsonl and test.jsonl"
        hint += ", and rows that are also in a held-out split are left out of the others"
    elif path.is_file():
        hint = f"; one in {HELD_OUT_EVERY} of its different prompts or texts ({different}) is held out for it"
    names = ", ".join(sorted(splits)) or "none"
    return _error(source, f"has no {split} split with rows; its splits: {names}{hint}")


def _error(source: Source, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{source.name} {problem}", key=source.key)
