"""Reviews from generated files, and from the real IMDB if LIT_KLRB_IMDB names its folder."""

import gzip
import json
import logging
import shutil

import datasets
import pytest

from lit_klrb.data import corpora
from lit_klrb.data.corpora import Source, load_rows
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row, parse_rows
from lit_klrb.data.modules import LabelledTextDataModule, TextDataModule
from lit_klrb.data.rows import clean_text, open_splits
from lit_klrb.errors import ConfigurationError

ROWS = [{"text": review.text, "label": review.label} for review in ReviewGrammar().reviews(400, seed=1)]


@pytest.fixture(autouse=True)
def cache_in(tmp_path, monkeypatch):
    """Keep files of the datasets library in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    """Splits in both formats, with common texts."""
    path = tmp_path / "reviews"
    path.mkdir()
    write(path / "train.parquet", ROWS[:300])
    write(path / "test.jsonl", ROWS[299:350])
    write(path / "unsup.parquet", [{"text": row["text"]} for row in [*ROWS[:40], *ROWS[349:]]])
    return path


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def as_row(row):
    return Row(None, (row["text"],), row["label"])


def labelled(source, split="train", **settings):
    return load_rows(Source(str(source), "labels", **settings), split)


def texts(reviews):
    return {review.text for review in reviews}


def test_grammar_splits_are_streams_of_their_own():
    train = load_rows("grammar", "train", size=50)
    assert load_rows(size=20) == train[:20]
    for split in ("validation", "test"):
        assert not texts(train) & texts(load_rows("grammar", split, size=50))


def test_grammar_refuses_all_reviews_and_unknown_splits():
    with pytest.raises(ConfigurationError, match=r"^source: grammar is unlimited"):
        load_rows("grammar", "train", size=0)
    with pytest.raises(ConfigurationError, match="no dev split with rows; its splits: test, train, valid"):
        load_rows("grammar", "dev", size=3)


def test_folder_has_its_files_as_splits(folder):
    test = labelled(folder, "test")
    assert sorted(test, key=str) == sorted((as_row(row) for row in ROWS[299:350]), key=str)
    assert {row.label for row in labelled(folder, train="unsup")} == {None}


def test_validation_is_carved_out_of_train_by_the_text(folder):
    train, validation = (load_rows(str(folder), split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 299
    assert 5 <= len(validation) <= 30
    write(folder / "train.parquet", ROWS[:150])
    corpora._corpus.cache_clear()
    fewer = load_rows(str(folder), "validation")
    assert texts(fewer) == texts(validation) & {row["text"] for row in ROWS[:150]}


def test_a_text_is_in_no_split_beside_the_one_it_is_held_out_in(folder, caplog):
    with caplog.at_level(logging.WARNING):
        source = Source(str(folder), train="train+unsup")
        both = texts(load_rows(source))
        splits = {name: texts(load_rows(source, name)) for name in ("validation", "test")}
    splits |= {"train": both, "unsup": both}
    assert ROWS[299]["text"] in splits["test"] - splits["train"] - splits["validation"]
    assert ROWS[349]["text"] in splits["test"] - splits["unsup"]
    assert not splits["validation"] & (splits["train"] | splits["unsup"])
    shared = splits["validation"] & {row["text"] for row in ROWS[:40]}
    assert shared
    dropped = ("1 train", f"{1 + len(shared)} unsup")
    logged = [message.split(": ")[1] for message in caplog.messages if "not read" not in message]
    assert logged == [f"dropped {n} rows that are also in a held-out split" for n in dropped]


def test_splits_a_source_has_are_left_alone(tmp_path, caplog):
    write(tmp_path / "train.jsonl", ROWS[:50])
    write(tmp_path / "validation.jsonl", ROWS[50:60])
    write(tmp_path / "test.jsonl", ROWS[60:80])
    sizes = [len(labelled(tmp_path, split)) for split in ("train", "validation", "test")]
    assert sizes == [50, 10, 20]
    assert not caplog.messages


def test_order_is_a_fixed_shuffle(folder):
    train = load_rows(str(folder), "train")
    assert train[:100] == load_rows(str(folder), "train", size=100)
    assert [row["text"] for row in ROWS[:100]] != [review.text for review in train[:100]]


def test_single_file_is_split_by_its_texts(tmp_path):
    for name in ("all.parquet", "all.jsonl"):
        source = write(tmp_path / name, ROWS)
        splits = [load_rows(source, split) for split in ("train", "validation", "test")]
        assert [len(split) for split in splits] == [360, 19, 21]
        assert set.union(*map(texts, splits)) == {row["text"] for row in ROWS}


@pytest.mark.parametrize(("different", "sizes"), [(2, [1, 1, 0]), (3, [1, 1, 1]), (12, [10, 1, 1])])
def test_of_few_rows_one_is_held_out_for_each_split(tmp_path, different, sizes):
    """Whatever their hashes; rows of the same prompt stay together."""
    rows = [{"prompt": f"Is {n} even?"} for n in range(different)]
    corpus = corpora.Corpus(Source(write(tmp_path / "rows.jsonl", rows * 2), "prompts"))
    found = [len(list(corpus.walk(name))) for name in ("train", "validation", "test")]
    assert found == [2 * n for n in sizes]


def test_hub_id_is_left_to_the_datasets_library(monkeypatch, tmp_path):
    """TRL's formats: subsets and splits of the hub; nothing of theirs is run."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    given = {"train_prefs": ROWS[:50], "test_prefs": ROWS[50:80]}
    hub = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows, features=features) for name, rows in given.items()}
    )
    calls = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **settings: calls.append((args, settings)) or hub
    )
    source = {"subset": "main", "train": "train_prefs", "evaluation": "test_prefs"}
    sizes = [len(labelled("nobody/reviews", split, **source)) for split in ("train", "validation", "test")]
    assert sizes == [50, 30, 30]
    assert {row.label for row in labelled("nobody/reviews", **source)} == {0, 1}
    assert calls == [(("nobody/reviews", "main"), {})], "no code of a stranger runs"
    with pytest.raises(
        ConfigurationError, match="no split train; its splits: test_prefs, train_prefs; choose"
    ):
        load_rows("nobody/reviews")


def test_whatever_the_datasets_library_reads_is_read(tmp_path):
    """Public reports: shards in a folder, `save_to_disk`, `.jsonl.gz` and arrays of `.json`."""
    rows = [{"text": f"None {n}", "date": "2020-01-01 10:00:00"} for n in range(60)]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "c.json").write_text(json.dumps(rows))
    (tmp_path / "d.csv").write_text("text,date\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    (tmp_path / "e.txt").write_text("\n".join(row["text"] for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "f.parquet")
    (tmp_path / "g.parquet.gz").write_bytes(gzip.compress((tmp_path / "f.parquet").read_bytes()))
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "shards" / "data").mkdir(parents=True)
    for number in range(2):
        name = f"train-0000{number}-of-00002-0a1b2c3d4e5f6071.parquet"
        table.shard(2, number, contiguous=True).to_parquet(tmp_path / "shards" / "data" / name)
    expected = [row["text"] for row in rows]
    others = "g.parquet.gz", "saved", "shards"
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.csv", "e.txt", "f.parquet", *others):
        found = open_splits("source", str(tmp_path / name))["train"]
        assert [row["text"] for row in found] == expected, name
        if name != "e.txt":
            assert next(iter(found))["date"] == rows[0]["date"], name


@pytest.mark.parametrize(
    "text", ["2020-01-01", "2020-01-02T10:00:00Z", "2020-01-01 10:00", "007", "\u2028\ufeff\U0001f600"]
)
def test_strings_of_json_are_read_as_they_stand(tmp_path, text):
    """Answers such as dates are no times, in no column and no message."""
    rows = [{"prompt": text, "turns": [{"content": text}], "n": n} for n in range(3)]
    (tmp_path / "lines.jsonl").write_text("\n\n".join(map(json.dumps, rows)), "utf-8-sig")
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), "utf-8")
    for name in ("lines.jsonl", "array.json"):
        assert list(open_splits("source", str(tmp_path / name))["train"]) == rows


def test_columns_that_a_line_of_json_does_not_have_stay_missing(tmp_path):
    """Rows of as many columns as there are rows would take memory quadratic in them."""
    lines = ['{"prompt": "a"}', '{"sign": 1.5, "prompt": "b"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    found = open_splits("source", str(tmp_path / "rows.jsonl"))["train"]
    assert [*found] == [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"text": "good"}\nno json\n', "line 2: Expecting value"),
        ('{"text": "good"}\n"good"\n', "row 2 is str; an object with columns is expected"),
        ('{"text": "good"', "Expecting ',' delimiter: line 1 column 16"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_json_that_cannot_be_read_is_refused_with_its_place(tmp_path, text, problem):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigurationError, match=f"rows.jsonl .*{problem}"):
        load_rows(str(tmp_path / "rows.jsonl"))


def table_of(tmp_path, name, text, encoding="utf-8"):
    """What a table in text has."""
    (tmp_path / name).write_bytes(text.encode(encoding))
    return [*open_splits("source", str(tmp_path / name))["train"]]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_a_line_with_more_cells_than_the_header_is_refused_with_its_number(tmp_path, name):
    """pandas#15203: one comma more shifted all columns, or ended up in an index."""
    sep = "," if name.endswith("csv") else "\t"
    lines = [("prompt", "completion"), ("Is 3 even?", " No"), ("Tell me", " is 3 even?", " No"), ("a", "b")]
    with pytest.raises(ConfigurationError, match="line 3: 3 cells, but the header has 2; a cell with "):
        table_of(tmp_path, name, "\n".join(map(sep.join, lines)))
    lines[2] = ("Tell me", "No", "", "")
    table = table_of(tmp_path, name, "\n".join(map(sep.join, [*lines, ("alone",)])))
    assert [[*row.values()] for row in table[1:]] == [["Tell me", "No"], ["a", "b"], ["alone", None]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('prompt,completion\n"Is 3,No\nIs 4,Yes\n', "line 3: unexpected end of data"),
        ("prompt,completion,completion\nIs 3,No,Yes\n", "the header has completion twice"),
    ],
)
def test_a_table_whose_cells_are_uncertain_is_refused(tmp_path, text, problem):
    with pytest.raises(ConfigurationError, match=problem):
        table_of(tmp_path, "rows.csv", text)


@pytest.mark.parametrize(("sep", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_another_separator_is_said(tmp_path, caplog, sep, name):
    text = f"prompt{sep}completion\nIs 3, say?{sep}No\n"
    assert table_of(tmp_path, "rows.csv", text) == [{"prompt": "Is 3, say?", "completion": "No"}]
    assert f"rows.csv: cells are separated by {name}" in caplog.text


@pytest.mark.parametrize(
    ("name", "encoding"), [("rows.csv", "latin1"), ("rows.jsonl", "utf-16"), ("rows.txt", "latin1")]
)
def test_an_encoding_other_than_utf_8_is_named_with_the_command_that_converts_it(tmp_path, name, encoding):
    with pytest.raises(ConfigurationError) as refused:
        table_of(tmp_path, name, 'text\n"é"\n', encoding)
    new = f"new{name.removeprefix('rows')}"
    line = f"it is not encoded in UTF-8; if it is {encoding}: iconv -f {encoding} -t utf-8 {name} > {new}"
    assert str(refused.value) == f"source: {tmp_path / name} cannot be read: {line}"


def test_of_a_large_table_rows_are_read_as_they_are_drawn(tmp_path, monkeypatch):
    """And each is that of its place, over the shards, also of the last one."""
    for number in range(2):
        numbers = range(500 * number, 500 * number + 500)
        rows = datasets.Dataset.from_list([{"text": f"Good {n}."} for n in numbers])
        rows.to_parquet(tmp_path / f"train-0000{number}-of-00002.parquet", batch_size=150)
    table, parsed = open_splits("source", str(tmp_path))["train"], []
    assert [table[n]["text"] for n in (0, 499, 500, 999)] == [f"Good {n}." for n in (0, 499, 500, 999)]
    assert [row["text"] for row in table] == [f"Good {n}." for n in range(1000)]
    original = corpora.parse_row
    monkeypatch.setattr(corpora, "parse_row", lambda *args: parsed.append(1) or original(*args))
    corpus = corpora.Corpus(Source(str(tmp_path)))
    rows, total = corpus.draw("train", 20)
    assert (len(rows), total) == (20, 1000)
    assert len(parsed) < 200
    numbers = [int(row.text[5:-1]) for row in rows]
    assert min(numbers) < 300 < 700 < max(numbers), "not the top of the file"
    assert all(f"row {number + 1}" in row.origin for number, row in zip(numbers, rows, strict=True))
    every = [row.text for split in ("train", "validation", "test") for row in corpus.draw(split, 0).rows]
    assert sorted(every) == sorted(row["text"] for row in table)


@pytest.mark.parametrize(("suffix", "sep"), [("csv", ","), ("tsv", "\t")])
def test_cells_of_tables_in_text_are_texts(tmp_path, suffix, sep):
    names = ("prompt", "completion", "other", "empty")
    cells = [("2+2=", "4", "True", "None"), ("James", "007", "False", "")]
    (tmp_path / f"rows.{suffix}").write_text("\n".join(map(sep.join, [names, *cells])))
    found = list(open_splits("source", str(tmp_path / f"rows.{suffix}"))["train"])
    assert found == [dict(zip(names, [text or None for text in row], strict=True)) for row in cells]


@pytest.mark.parametrize(("suffix", "said"), [("tsv", True), ("csv", False)])
def test_lines_that_a_quote_joins_are_counted_where_quotes_are_no_rule(tmp_path, caplog, suffix, said):
    path = tmp_path / f"rows.{suffix}"
    path.write_text('text\n"Good\nfine\n\nBad"\n5" or 6"\n')
    assert [*open_splits("source", str(path))["train"]] == [
        {"text": "Good\nfine\n\nBad"},
        {"text": '5" or 6"'},
    ]
    assert ("4 lines are 2 rows" in caplog.text) == said


def test_labels_of_tables_in_text_are_numbers(tmp_path):
    lines = ["text,label", *(f"Good {n}.,{label}" for n, label in enumerate(["1", "0", "-1", "", "1.0"]))]
    (tmp_path / "reviews.csv").write_text("\n".join([*lines, "Good 5.,True"]))
    corpus = corpora.Corpus(Source(str(tmp_path / "reviews.csv"), "labels"))
    splits = [*map(corpus.walk, ("train", "validation", "test"))]
    found = {row.text: row.label for rows in splits for row in rows}
    assert [found[f"Good {n}."] for n in range(6)] == [1, 0, None, None, 1, 1]


def test_a_split_is_in_one_file_or_in_its_shards(tmp_path):
    """Rows in two formats would be read twice."""
    write(tmp_path / "train.jsonl", ROWS[:40])
    for other in ("train.parquet", "train-00000-of-00001.parquet"):
        write(tmp_path / other, ROWS[:40])
        names = " and ".join(sorted(["train.jsonl", other]))
        with pytest.raises(ConfigurationError, match=f"{names} are the same split"):
            load_rows(str(tmp_path))
        (tmp_path / other).unlink()


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("One.<br /><br />Two.", "One.\n\nTwo."),
        ("One. <br /> Two.", "One.\nTwo."),
        ("It\x92s \x93so\x94 good \x96 really\x85", "It’s “so” good – really…"),
        ("a\x81b\x8d\x8f\x90\x9d", "ab"),
        ("naïve café — 電影", "naïve café — 電影"),
        ("<br /><br /> One.<br />", "One."),
        ("1 < 2 <b>bold</b>\ttab", "1 < 2 <b>bold</b>\ttab"),
    ],
)
def test_cleaning(raw, clean):
    assert clean_text(raw) == clean


def test_what_is_cleaned_is_counted(tmp_path, caplog):
    source = write(tmp_path / "rows.jsonl", [{"text": text} for text in ("fine", " \tcode", "a<br />b", "")])
    rows = parse_rows(source, open_splits("source", source)["train"], "texts")
    assert [row.text for row in rows] == ["fine", "code", "a\nb", ""]
    assert "converted 2 of 4 rows: <br /> tags" in caplog.text


def test_texts_are_cleaned_before_they_are_compared(tmp_path):
    write(tmp_path / "train.jsonl", [{"text": "It\x92s good.<br />Yes.", "label": 1}, *ROWS[:40]])
    write(tmp_path / "test.jsonl", [{"text": "It’s good.\nYes.", "label": 1}])
    assert texts(load_rows(str(tmp_path), "test")) == {"It’s good.\nYes."}
    assert len(load_rows(str(tmp_path), "train")) + len(load_rows(str(tmp_path), "validation")) == 40


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], " has no train split with rows"),
        (
            [{"review": "Good.", "label": 1}],
            "1 no column text; its columns: review, label; add --data.columns ",
        ),
        ([{"text": "Good.", "label": 2}], "1 the label 2; allowed: 1, 0, and -1 for unknown ({} row 1)"),
        (
            [{"text": 5}, {"text": 6}, {"text": "Good."}],
            ": 2 of 3 train rows cannot be read: 2 a number as text",
        ),
        ([{"text": "\ud800"}], "1 no Unicode text as text"),
    ],
)
def test_rows_of_which_most_cannot_be_read_are_refused(tmp_path, rows, message):
    source = write(tmp_path / "reviews.jsonl", rows)
    data = LabelledTextDataModule(source=source)
    with pytest.raises(ConfigurationError) as error:
        data.drawn(Source(source, "labels", splits=False), "train", 0)
    assert str(error.value).startswith(f"source: {source}")
    assert message.format(source) in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_that_change_the_meaning_of_a_row_are_said_not_to_be_read(caplog):
    row = {"prompt": "What is this?", "completion": " A cat", "id": 0, "tools": []}
    rows = [row | {"images": images} for images in ([], ["a.png"])]
    for want, unread in (("texts", "id, images"), ("prompts", "images")):  # id reaches rewards
        caplog.clear()
        assert len(parse_rows("here", rows, want)) == 2
        assert caplog.messages == [f"here: columns that are not read: {unread}"]
    caplog.clear()
    parse_rows("here", [{**row, "tools": [{"name": "f"}]}], "prompts")
    assert caplog.messages == ["here: columns that are not read: tools"], "of texts, no template has them"


@pytest.mark.parametrize(
    ("pair", "prompt"),
    [
        (("The sky is blue", "The sky is black"), "The sky is"),
        (("Q: 2\nA: 4", "Q: 2\nA: 5"), "Q: 2\nA:"),
        (("It was", "It was bad"), "It"),
        (("yes", "yellow"), ""),
    ],
)
def test_texts_without_a_prompt_begin_with_it(pair, prompt):
    chosen, rejected = pair
    row = {"chosen": chosen, "rejected": rejected}
    (found,) = parse_rows("here", [row], "pairs")
    assert found.prompt == prompt
    assert tuple(found.prompt + answer for answer in found.answers) == pair
    assert parse_rows("here", [row], "preferences") == [Row("", pair)], "whole texts"
    assert parse_rows("here", [row], "prompts")[0].prompt == prompt


def test_rows_without_a_value_are_not_held_out(tmp_path):
    """They are counted where they are: as one text they would all be in the test split."""
    rows = [{"text": f"Good {n}." if n % 4 else None} for n in range(200)]
    for name, given in (("none.jsonl", rows), ("empty.jsonl", [{"text": row["text"] or ""} for row in rows])):
        source = write(tmp_path / name, given)
        splits = {split: load_rows(source, split) for split in ("train", "validation", "test")}
        assert [[row.text for row in some].count("") for some in splits.values()] == [50, 0, 0]


def test_the_files_of_a_folder_named_train_are_one_split(tmp_path):
    """As the hub converts data sets to parquet."""
    (tmp_path / "default" / "pictures").mkdir(parents=True)
    for number, name in enumerate(("train/0000", "train/0001", "test_prefs/0000", "other")):
        path = tmp_path / "default" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([{"text": f"Good {number}."}]).to_parquet(path)
    splits = open_splits("source", str(tmp_path), "default")
    found = {split: [row["text"] for row in rows] for split, rows in splits.items()}
    assert found == {"train": ["Good 0.", "Good 1."], "test_prefs": ["Good 2."], "other": ["Good 3."]}
    shutil.copy(tmp_path / "default" / "other.parquet", tmp_path / "default" / "train.parquet")
    with pytest.raises(ConfigurationError, match=r"train\.parquet and 0001\.parquet are the same split"):
        len(open_splits("source", str(tmp_path), "default")["train"])


def test_missing_sources_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\nno json\n', "utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    for source, reason in (
        ("nobody/nothing", "cannot be read"),
        (str(tmp_path / "none.parquet"), "does not exist"),
        (str(broken), "cannot be read: "),
        (str(empty), "is a folder without files that can be read"),
    ):
        with pytest.raises(ConfigurationError) as error:
            load_rows(source)
        message = str(error.value)
        assert message.startswith(f"source: {source} {reason}")
        assert "\n" not in message


def test_a_split_without_reviews_is_named(tmp_path):
    source = write(tmp_path / "train.jsonl", ROWS[:1])
    with pytest.raises(ConfigurationError, match="has no test split with rows; its splits: train"):
        load_rows(source, "test")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "test.jsonl", ROWS[:1])
    with pytest.raises(ConfigurationError, match="has no train split with rows; its splits: test"):
        load_rows(str(folder))


@pytest.mark.parametrize("names", ["", "train+train", "train+", "train+test"])
def test_training_splits_are_different_and_not_the_evaluations(names):
    with pytest.raises(ConfigurationError, match=r"^split: must name different splits"):
        TextDataModule(split=names, eval_split="test")


def test_prompts_that_are_all_in_the_test_split_too_are_said_to_be_left_out(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "It was"}\n')
    with pytest.raises(
        ConfigurationError, match=r"has no train split .* also in a held-out split are left out"
    ):
        load_rows(Source(str(tmp_path), "prompts"))
