"""Conversations become texts by the tokenizer's own chat template."""

import json

import pytest
from chat_tokenizer import by_hand, chat_tokenizer, message
from written import write_rows

from lit_klrb.data.chat import Conversation, LeftOutError, as_messages
from lit_klrb.data.corpora import Source, load_rows
from lit_klrb.data.encode import not_empty
from lit_klrb.data.kinds import PROMPT, parse_rows
from lit_klrb.data.lengths import Selection
from lit_klrb.data.prompts import PreferencePair, read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.data.rows import open_splits
from lit_klrb.errors import ConfigurationError

USER, ANSWER, SYSTEM = message("user", "Hi"), message("assistant", "Yes"), message("system", "Be")


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def write(path, rows):
    if path.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
    return str(path)


def prompt_of(folder, tokenizer, row, **settings):
    """The only prompt of a folder whose other splits do not interfere."""
    source = write(folder / "train.jsonl", [row])
    for split in ("validation", "test"):
        write(folder / f"{split}.jsonl", [{PROMPT: f"other {split}"}])
    (row,) = load_rows(Source(source.rpartition("/")[0], "prompts"))
    own = {name: settings.pop(name) for name in ("system_prompt", "template") if name in settings}
    (prompt,) = read_prompts([row], Reader("source", tokenizer, (), **own), 2, 3, **settings)
    return prompt


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": [USER]}, [("user", "Hi")]),
        ({"prompt": [SYSTEM, USER]}, [("system", "Be"), ("user", "Hi")]),
        ({"prompt": [USER, ANSWER, USER]}, [("user", "Hi"), ("assistant", "Yes"), ("user", "Hi")]),
        ({"messages": [USER, ANSWER]}, [("user", "Hi")]),
        ({"messages": [USER, ANSWER, USER]}, [("user", "Hi"), ("assistant", "Yes"), ("user", "Hi")]),
    ],
)
def test_a_prompt_is_the_template_with_the_beginning_of_an_answer(tmp_path, tokenizer, row, expected):
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id, "both add a BOS"
    prompt = prompt_of(tmp_path / "chats", tokenizer, {**row, "number": 7})
    assert prompt.tokens == by_hand(tokenizer, *expected)
    assert prompt.tokens.count(tokenizer.bos_token_id) == 1
    assert prompt.columns == {"number": 7, "prompt": [message(*part) for part in expected]}
    assert prompt.is_given


def test_an_answer_that_is_begun_is_continued(tmp_path, tokenizer):
    prompt = prompt_of(tmp_path / "chats", tokenizer, {"prompt": [USER, ANSWER]})
    whole = by_hand(tokenizer, ("user", "Hi"), ("assistant", "Yes"), begun=False)
    assert prompt.tokens == whole[:-2], "without EOS and newline"
    given = as_messages([prompt.columns["prompt"], [USER]], [" it is", "No"])
    assert given == {
        "prompts": [[USER], [USER]],
        "completions": [[message("assistant", "Yes it is")], [message("assistant", "No")]],
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": [USER]}, [("system", "Act"), ("user", "Hi")]),
        ({"prompt": "Hi"}, [("system", "Act"), ("user", "Hi")]),
        ({"prompt": [SYSTEM, USER]}, [("system", "Be"), ("user", "Hi")]),
    ],
)
def test_a_system_prompt_is_for_conversations_without_one(tmp_path, tokenizer, row, expected):
    prompt = prompt_of(tmp_path / "chats", tokenizer, row, system_prompt="Act")
    assert prompt.tokens == by_hand(tokenizer, *expected)


def test_a_system_prompt_for_the_beginnings_of_texts_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigurationError, match=r"^system_prompt: needs conversations or texts in the col"):
        prompt_of(tmp_path / "texts", tokenizer, {"text": "Hi there"}, system_prompt="Act")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system_prompt": "Act<eos>"}, "system_prompt: contains the control token <eos>"),
        ({"teacher_system_prompt": "Act<eos>"}, "teacher_system_prompt: contains the control token <eos>"),
        ({"teacher_examples": [("Q", "<eos>")]}, "teacher_examples: contains the control token <eos>"),
        (
            {"template": {"think": False}},
            "chat_template_kwargs: the chat template has no setting think; it has: none",
        ),
        ({"template": {"messages": []}}, "chat_template_kwargs: the chat template has no setting messages; "),
        (
            {"teacher_template": {"a": 1}},
            "teacher_chat_template_kwargs: the chat template has no setting a; ",
        ),
    ],
)
def test_a_setting_that_the_template_would_misread_or_ignore_is_refused(
    tmp_path, tokenizer, settings, message
):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        prompt_of(tmp_path / "chats", tokenizer, {"prompt": "Hi"}, **settings)


def test_conversations_are_split_and_told_apart_by_their_messages(tmp_path, tokenizer):
    rows = [{"prompt": [message("user", f"question {n}")], "n": n} for n in range(200)]
    for suffix in ("jsonl", "parquet"):
        source = write(tmp_path / f"chats.{suffix}", rows + rows[:5])
        splits = {
            name: load_rows(Source(source, "prompts"), name) for name in ("train", "validation", "test")
        }
        numbers = {name: {review.columns["n"] for review in split} for name, split in splits.items()}
        assert set.union(*numbers.values()) == set(range(200))
        assert sum(map(len, numbers.values())) == 200
        assert all(3 <= len(numbers[name]) <= 25 for name in ("validation", "test"))
        if suffix == "jsonl":
            first = numbers
    assert first == numbers


CONVERSATIONS = [
    {"prompt": [USER], "chosen": [ANSWER], "rejected": [message("assistant", "No")]},
    {"chosen": [USER, ANSWER], "rejected": [USER, message("assistant", "No")]},
    {"prompt": "ignored", "chosen": [USER, ANSWER], "rejected": [USER, message("assistant", "No")]},
]


@pytest.mark.parametrize("row", CONVERSATIONS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_preferences_of_conversations(tmp_path, tokenizer, row, suffix):
    source = write(tmp_path / f"pairs.{suffix}", [row])
    pair = pair_of(tokenizer, source)
    assert pair[:3] == (by_hand(tokenizer, ("user", "Hi")), *answers(tokenizer))
    pair = pair_of(tokenizer, source, "Act")
    assert pair.prompt == by_hand(tokenizer, ("system", "Act"), ("user", "Hi"))


def test_tools_have_the_parameters_of_their_own_row(tmp_path):
    """Tables in columns give all rows the parameters of each, without values."""
    template = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    rows = [
        {"messages": [USER, ANSWER], "tools": [{"name": "f", "parameters": {name: {"type": "string"}}}]}
        for name in ("x", "y")
    ]
    found = []
    for suffix in ("jsonl", "parquet"):
        table = open_splits("source", write(tmp_path / f"rows.{suffix}", rows))["train"]
        parsed = parse_rows("here", table, "texts")
        found.append([row.answers[0].text("source", chat_tokenizer(template)) for row in parsed])
    assert found[0] == found[1]
    assert '"parameters": {"y": {"type": "string"}}' in found[1][1]


def answers(tokenizer):
    ids = tokenizer(["Yes", "No"], add_special_tokens=False)["input_ids"]
    return [[*answer, tokenizer.eos_token_id] for answer in ids]


def pair_of(tokenizer, source, system=None):
    (row,) = parse_rows(source, open_splits("preferences", source)["train"], "preferences")
    reader = Reader("preferences", tokenizer, [tokenizer.eos_token_id], system)
    return PreferencePair.of(*(reader.answered(row.prompt, answer) for answer in row.answers))


def test_a_template_without_an_eos_after_the_answer():
    """The EOS of an earlier turn, or a BOS that is the same token, ends nothing."""
    template = "{{ eos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    chat = Conversation((USER, ANSWER), "here")
    assert chat.text("key", chat_tokenizer(template)) == "<eos>[Hi][Yes]"
    assert chat.text("key", chat_tokenizer()) == "<bos><|user|>Hi<eos>\n<|assistant|>Yes"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"role": "user"}, "a message whose content is nothing"),
        ([message("narrator", "Hi")], "a message of the role 'narrator'; known are system, developer, user"),
        ([{"from": ["human"], "value": "Hi"}], "a message whose role is a list"),
        ([message("user", 5)], "a message whose content is a number"),
        ([message("user", [{"type": "image", "url": "Hi"}])], "a message whose content is a list"),
        ([SYSTEM], "the last message is the system's, not the user's"),
        ([USER, "Hi"], "a text in place of a message"),
        (5, "a number as prompt"),
        (message("user", "[" * 2000), "nested"),
    ],
)
def test_a_row_that_is_no_conversation_is_left_out_and_counted(tokenizer, value, why):
    """Public reports: unsloth#334, datasets#7222: one odd row ended the run."""
    if why == "nested":
        for _ in range(2000):
            value = {"role": "user", "content": [value]}
    good = {"prompt": [USER]}
    rows = parse_rows("here", [good, {"prompt": value}, good], "prompts")
    reader, selection = Reader("source", tokenizer, ()), Selection("source", "here", "train")
    assert len(selection.read(rows, lambda _, row: reader.prompt(row.prompt))) == 2
    ((reason, places),) = selection.reasons.items()
    assert reason.startswith(why)
    assert places == ["here row 2"]


HI, YES = ("user", "Hi"), ("assistant", "Yes")
SAID = [message(*HI), message(*YES)]


@pytest.mark.parametrize(
    "value",
    [
        [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}],
        [message("Human", "Hi"), message("GPT", "Yes")],
        [{"role": "user", "value": "Hi"}, {"from": "model", "content": "Yes"}],
        [{"input": "Hi", "output": "Yes"}],
        ["Hi", "Yes"],
        json.dumps(SAID),
        str(SAID),
    ],
)
@pytest.mark.parametrize("name", ["messages", "conversations", "conversation"])
def test_forms_of_conversations(value, name):
    """Automodel#3143: roles by other names; diatool-dpo#2: lists that a table in text has as text."""
    (row,) = parse_rows("here", [{name: value}], "texts")
    assert row.problem == ""
    assert [(m["role"], m["content"]) for m in row.answers[0].messages] == [HI, YES]


def test_one_message_may_be_written_as_text_too():
    (row,) = parse_rows("here", [{"prompt": "Hi", "completion": json.dumps(message(*YES))}], "texts")
    assert row.answers[0].messages == (message(*YES),)
    (row,) = parse_rows("here", [{"prompt": "Hi", "completion": '{"value": 7}'}], "texts")
    assert row.answers == ('{"value": 7}',), "an answer in JSON is a text"


@pytest.mark.parametrize(
    ("want", "row", "why"),
    [
        (
            "pairs",
            {"chosen": [USER, ANSWER], "rejected": [SYSTEM, ANSWER]},
            "conversations that differ before the answer",
        ),
        ("pairs", {"chosen": [ANSWER], "rejected": [ANSWER]}, "no message before the assistant's"),
        (
            "pairs",
            {"prompt": [USER], "chosen": [ANSWER, message("tool", "7"), ANSWER], "rejected": [ANSWER]},
            "several messages after the prompt",
        ),
        ("pairs", {"prompt": [USER], "chosen": [], "rejected": [ANSWER]}, "empty"),
        ("prompts", {"messages": [ANSWER]}, "no message before the assistant's"),
        ("prompts", {"prompt": []}, "empty"),
        (
            "pairs",
            {"chosen": [USER], "rejected": [USER, ANSWER]},
            "chosen ends with the role user, not with the assistant's answer",
        ),
        ("texts", {"messages": []}, "empty"),
    ],
)
def test_a_conversation_that_a_stage_cannot_use_is_left_out(tokenizer, caplog, want, row, why):
    """And counted, as one among thousands does not refuse a data set."""
    pair = {"chosen": [USER, ANSWER], "rejected": [USER, message("assistant", "No")]}
    good = pair if want == "pairs" else {"messages": [USER, ANSWER]}
    selection, reader = Selection("source", "here", "train"), Reader("source", tokenizer, ())

    def make(index, row):
        return reader.prompt(not_empty(row.prompt)) if want == "prompts" else not_empty(row.answers[0])

    beside = {"text": " not read"} if want == "pairs" else {}
    rows = parse_rows("here", [good, row | beside, good], want)
    assert "converted" not in caplog.text
    assert len(selection.read(rows, make)) == 2
    assert selection.reasons == {why: ["here row 2"]}


def test_a_tokenizer_without_a_template():
    with pytest.raises(ConfigurationError) as error:
        Conversation((USER,), "chats.jsonl row 3").prompt("source", chat_tokenizer(None))
    assert str(error.value) == (
        "source: chats.jsonl row 3 is a conversation, but the tokenizer has no chat template; start from a "
        "model whose tokenizer has one, or give texts"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch evil') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}x",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% for m in messages %}{{ m.update(content='other') }}{% endfor %}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{{ raise_exception('roles must\\nalternate') }}",
        "{% for",
        "",
    ],
)
def test_a_hostile_template_runs_in_the_sandbox(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    chat = Conversation((USER, ANSWER), "row 1")
    with pytest.raises(LeftOutError, match=r"^the chat template ") as error:
        chat.text("source", chat_tokenizer(template))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    assert chat.messages == (message("user", "Hi"), message("assistant", "Yes"))
