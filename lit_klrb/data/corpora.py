"""Loading and splitting of rows from the embedded world, the hub, a folder or a file."""

import hashlib
import logging
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row, Want, parse_rows
from lit_klrb.data.prompts import grammar_pairs
from lit_klrb.data.rows import open_splits
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


def load_rows(source: Source | str = GRAMMAR, split: str = "train", size: int = 0) -> list[Row]:
    """Load the rows of a split, shuffled.

    If a source has no test or validation split, one in 20 train rows is held out for it, and at least one,
    chosen by a hash of the prompt or of the text. Rows of the test split are removed from all other splits,
    and those of the validation split from all splits but test; their number is logged. A size of 0 is for
    all rows.

    Example:
        >>> load_rows("grammar", "test", size=2) == load_rows("grammar", "test", size=3)[:2]
        True
    """
    source = Source(source) if isinstance(source, str) else source
    if source.name != GRAMMAR:
        parts = source.train.split("+") if split == "train" else [split]
        splits = _load_splits(source)
        together = [row for part in parts for row in _pick(source, splits, part, size)]
        return together if len(parts) == 1 else _pick(source, {split: together}, split, size)
    if split not in (own := ("train", *HELD_OUT)):
        raise _no_split(source, split, own)
    if not size:
        raise _error(source, "is unlimited: a size of 0 (all rows) is allowed for other sources")
    if source.want == "preferences":
        return grammar_pairs(split, size)
    reviews = ReviewGrammar().reviews(size, derive_seed(0, "corpus", split))
    return [Row(None, (review.text,), review.label) for review in reviews]


def held_out_prompts(source: Source) -> set[str]:
    """The given prompts of the test and validation splits, as in `Row.text`; none of beginnings of texts."""
    splits = {} if source.name == GRAMMAR else _load_splits(source)
    return {row.text for name in HELD_OUT for row in splits.get(name, ()) if row.prompt is not None}


def given_prompts(source: str) -> list[Row]:
    """All prompts of a single file, in its order; none if it is no file, or has texts instead of prompts."""
    if not local_path(source, KEY).is_file():
        return []
    prompts = parse_rows(KEY, source, open_splits(KEY, source)["train"], "prompts")
    return prompts if any(row.prompt is not None for row in prompts) else []


@cache
def _load_splits(source: Source) -> dict[str, list[Row]]:
    """The splits that are read of a source, in its order; held-out rows are removed from the others."""
    opened = open_splits(KEY, source.name, source.subset)
    trained = source.train.split("+")
    names = {name: name for name in (*trained, *HELD_OUT) if name in opened}
    if source.evaluation is not None:
        names |= dict.fromkeys(HELD_OUT, source.evaluation)
    splits, known = dict[str, list[Row]](), dict[str, list[Row]]()
    for name, given in names.items():
        if given not in opened:
            raise _error(source, f"has no split {given}; its splits: {', '.join(sorted(opened))}")
        place = source.name if len(opened) == 1 else f"{source.name}: {given}"
        known[given] = known.get(given) or parse_rows(KEY, place, list(opened[given]), source.want)
        splits[name] = known[given]
    if not splits:
        found = ", ".join(sorted(opened))
        raise _error(source, f"has no split {trained[0]}; its splits: {found}; choose with split, eval_split")
    return hold_out(source, splits)


def hold_out(source: Source, given: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Hold out rows for missing splits, and remove rows of held-out splits from the others."""
    splits, first = dict(given), source.train.split("+")[0]
    for number, name in enumerate(HELD_OUT):
        if first in splits and name not in splits:
            names = [*map(_identity, splits[first])]
            hashes = {n: zlib.crc32(n.encode()) for n in names if n}
            chosen = {n for n, value in hashes.items() if value % HELD_OUT_EVERY == number}
            if not chosen and len(hashes) > len(HELD_OUT) - number:  # at least one, and one is left
                chosen = {min(hashes, key=lambda n: (hashes[n], n))}
            held_out = [n in chosen for n in names]
            splits[name] = list(compress(splits[first], held_out))
            splits[first] = list(compress(splits[first], (not is_held_out for is_held_out in held_out)))
    seen: set[str] = set()
    for name in sorted(splits, key=[*HELD_OUT, *splits].index):
        rows = splits[name]
        if not (name == "validation" and source.evaluation is not None):
            splits[name] = [row for row in rows if _identity(row) not in seen]
        if splits[name] and (dropped := len(rows) - len(splits[name])):
            about = f"{source.name}: dropped {dropped} {name} rows"
            log.warning(f"{about} that are also in a held-out split")
        if name in HELD_OUT:
            seen.update(filter(None, map(_identity, rows)))
    return splits


def _identity(row: Row) -> str:
    """What rows of the same prompt have in common; a row without one is on its own. Empty of empty rows."""
    if not any((row.prompt, *row.answers)):
        return ""
    if row.prompt is None or not row.answers:
        return row.text
    # Its CRC-32 decides the split, and is far from uniform over short texts that differ in a digit
    return hashlib.sha256((row.text or str(row.answers[0])).encode()).hexdigest()


def _pick(source: Source, splits: Mapping[str, Sequence[Row]], split: str, size: int) -> list[Row]:
    rows = list(splits.get(split, ()))
    if not rows:
        different = {_identity(row) for some in splits.values() for row in some}
        raise _no_split(source, split, [name for name, some in splits.items() if some], len(different))
    random.Random(derive_seed(0, "order", split)).shuffle(rows)
    return rows[:size] if size else rows


def _no_split(source: Source, split: str, found: Iterable[str], different: int = 0) -> ConfigurationError:
    path, hint = Path(source.name).expanduser(), ""
    if path.is_dir():
        hint = "; the files of a folder are its splits, such as train.jsonl and test.jsonl"
        hint += ", and rows that are also in a held-out split are left out of the others"
    elif path.is_file():
        hint = f"; one in {HELD_OUT_EVERY} of its different prompts or texts ({different}) is held out for it"
    names = ", ".join(sorted(found)) or "none"
    return _error(source, f"has no {split} split with rows; its splits: {names}{hint}")


def _error(source: Source, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{source.name} {problem}", key=KEY)
