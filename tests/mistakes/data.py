"""Mistakes in data: missing or damaged files, and wrong encodings, columns, types or formats."""

import json
from collections.abc import Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake
from mistakes.places import KINDS, odd_places

DEEP = 100_000


def review(text, label=1):
    return json.dumps({"text": text, "label": label}) + "\n"


TEXTS = "".join(review(f"The film was good {n}.", n % 2) for n in range(60))
DATA: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank_lines.jsonl": b"\n\n\n",
    "spaces.jsonl": b"   ",
    "one_row.jsonl": review("The film was good.").encode(),
    "latin1.jsonl": TEXTS.replace("good", "caf\u00e9").encode("latin-1"),
    "utf16.jsonl": TEXTS.encode("utf-16"),
    "bom.jsonl": TEXTS.encode("utf-8-sig"),
    "truncated.jsonl": TEXTS.encode()[:-20],
    "not_json.jsonl": b"The film was good.\n" * 5,
    "array.jsonl": b"[1, 2, 3]\n" * 5,
    "deep.jsonl": b'{"text": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "binary.jsonl": bytes(range(256)) * 20,
    "nul.jsonl": b"\0" * 1000,
    "no_text.jsonl": b'{"txt": "a"}\n' * 5,
    "null_text.jsonl": b'{"text": null, "label": 1}\n' * 5,
    "label_5.jsonl": review("The film was good.", 5).encode() * 5,
    "label_text.jsonl": review("The film was good.", "positive").encode() * 5,
    "label_nan.jsonl": b'{"text": "a film", "label": NaN}\n' * 5,
    "unlabelled.jsonl": "".join(f'{{"text": "The film was good {n}."}}\n' for n in range(60)).encode(),
    "blank_texts.jsonl": "".join(review(" " * n) for n in range(60)).encode(),
    "surrogate.jsonl": b'{"text": "a \\ud800 film", "label": 1}\n' * 60,
    "long.jsonl": "".join(review(f"{n} " + "film " * 20_000, n % 2) for n in range(60)).encode(),
    "one_class.jsonl": "".join(review(f"The film was good {n}.") for n in range(60)).encode(),
    "empty.parquet": b"",
    "text.parquet": TEXTS.encode(),
    "no_chosen.jsonl": b'{"prompt": "The film", "rejected": "was bad"}\n' * 5,
    "null_chosen.jsonl": b'{"prompt": "The film", "chosen": null, "rejected": "was bad"}\n' * 5,
    "empty_prompt.jsonl": b'{"prompt": "", "chosen": "a", "rejected": "was bad"}\n' * 5,
    "chat.jsonl": b'{"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}\n' * 5,
    "chat_role.jsonl": b'{"prompt": [{"role": "human", "content": "a"}]}\n' * 5,
    "chat_empty.jsonl": b'{"prompt": []}\n' * 5,
    "chat_number.jsonl": b'{"prompt": [{"role": "user", "content": 5}]}\n' * 5,
    "chat_mixed.jsonl": b'{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": "a"}\n' * 5,
    "reviews.csv": b"text,label\ngood,1\n",
    "reviews.json": b'[{"text": "good", "label": 1}]',
    "a_file": b"a file\n",
}


def make_data(root: Path) -> None:
    """Write files and folders of data."""
    for name, content in DATA.items():
        (root / name).write_bytes(content)
    (root / "truncated.parquet").write_bytes(parquet()[:-20])
    odd_places(root, "jsonl", "parquet", "csv")
    for folder, files in {
        "empty": {},
        "only_csv": {"train.csv": DATA["reviews.csv"]},
        "only_test": {"test.jsonl": TEXTS.encode()},
        "one_damaged": {"train.jsonl": TEXTS.encode(), "test.jsonl": b"{"},
        "empty_train": {"train.jsonl": b"", "test.jsonl": TEXTS.encode()},
        "same_texts": {"train.jsonl": TEXTS.encode(), "test.jsonl": TEXTS.encode()},
    }.items():
        (root / folder).mkdir()
        for name, content in files.items():
            (root / folder / name).write_bytes(content)


def parquet() -> bytes:
    """A complete Parquet file of reviews."""
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in TEXTS.splitlines()]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


# What a source of reviews may say; the others are refused for what they hold.
FINE_DATA = {"bom.jsonl", "unlabelled.jsonl", "long.jsonl", "one_class.jsonl"}
NO_REVIEWS = {"no_chosen.jsonl", "null_chosen.jsonl", "empty_prompt.jsonl", "chat.jsonl", "a_file"}


def wrong_data() -> Iterator[Mistake]:
    """Each file as the source of reviews; some also as preferences."""
    for name in (*DATA, "truncated.parquet"):
        if name not in NO_REVIEWS:
            line = None if name in FINE_DATA else rf"data\.init_args\.source: FILES/{escape(name)} "
            yield Mistake(["--data.source", f"FILES/{name}"], line)
    for kind in KINDS:
        for suffix in ("jsonl", "parquet", "csv"):
            line = rf"data\.init_args\.source: FILES/{kind}\.{suffix} "
            yield Mistake(["--data.source", f"FILES/{kind}.{suffix}"], line)
    for name in ("empty", "only_csv", "only_test", "one_damaged", "empty_train", "same_texts", "a_file"):
        file = r"/test\.jsonl" if name == "one_damaged" else ""
        line = rf"data\.init_args\.source: FILES/{name}{file} "
        yield Mistake(["--data.source", f"FILES/{name}"], line)
    for name in (
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "no/such/hub/id",
        "no-such/hub-id",
        ".",
        "~",
        "x" * 5000,
    ):
        shown = "(null|None|~)" if name == "~" else escape(name[:200])  # null, in YAML
        line = rf"data\.init_args\.source: {shown}"
        yield Mistake(["--data.source", name], line)
    for name in ("unlabelled", "empty", "label_5", "one_row"):
        line = rf"data\.init_args\.source: FILES/{name}\.jsonl "
        yield Mistake(["--data.source", f"FILES/{name}.jsonl"], line, "reward")
    for name in ("empty", "no_text", "latin1", "blank_texts", "one_row"):
        line = rf"data\.init_args\.source: FILES/{name}\.jsonl "
        yield Mistake(["--data.source", f"FILES/{name}.jsonl"], line, "sft")
    for name in [
        "empty",
        "no_chosen",
        "null_chosen",
        "empty_prompt",
        "chat",
        "truncated",
        "fifo",
        "folder",
        "deep",
    ]:
        line = rf"data\.init_args\.preferences: FILES/{name}\.jsonl "
        yield Mistake(["--data.preferences", f"FILES/{name}.jsonl"], line, "dpo")
