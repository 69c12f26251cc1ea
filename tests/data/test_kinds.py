"""Columns that change the meaning of a row are read, or said not to be; other names are offered."""

import pytest
from chat_tokenizer import TEMPLATE, chat_of, chat_tokenizer, message, reader_of

from lit_klrb.data.chat import Conversation, LeftOutError
from lit_klrb.data.encode import decoded
from lit_klrb.data.kinds import Row, parse_row
from lit_klrb.data.lengths import Selection
from lit_klrb.data.modules import TextDataModule
from lit_klrb.data.reader import Reader
from lit_klrb.errors import ConfigurationError

ASK, NO, YES = message("user", "Is 7 even?"), message("assistant", "No."), message("assistant", "Yes.")
SYSTEM = message("system", "Be brief.")
TEXTS = {"chosen": "No.", "rejected": "Yes."}


def contents(row):
    """Prompt and answers, conversations as pairs of role and content."""
    found = (row.prompt, *row.answers)
    return [[*map(tuple, map(dict.values, c.messages))] if isinstance(c, Conversation) else c for c in found]


def said(*messages):
    return [tuple(m.values()) for m in messages]


# fmt: off
READ = {
    "Automodel#3143, unsloth#11053: a system message before conversations": ("texts",
        {"system": "Be brief.", "messages": [ASK, NO]}, [None, said(SYSTEM, ASK, NO)]),
    "before a prompt": ("prompts", {"system_prompt": "Be brief.", "prompt": [ASK]}, [said(SYSTEM, ASK)]),
    "before preferences": ("pairs", {"system": "Be brief.", "chosen": [ASK, NO], "rejected": [ASK, YES]},
        [said(SYSTEM, ASK), said(NO), said(YES)]),
    "the conversation's own stays": ("texts", {"system": "Other", "messages": [SYSTEM, ASK, NO]},
        [None, said(SYSTEM, ASK, NO)]),
    "maxtext#3895, promptfoo#449: a question is the prompt of preferences": ("pairs",
        {"question": "Is 7 even?", "chosen": "The number 7 is not.", "rejected": "The number 7 is."},
        ["Is 7 even?\n\n", "The number 7 is not.", "The number 7 is."]),
    "a reward model reads it, too": ("preferences", {"input": "Is 7 even?", **TEXTS},
        ["Is 7 even?", "No.", "Yes."]),
    "an instruction with its input": ("pairs", {"instruction": "Double it.", "input": "7", **TEXTS},
        ["Double it.\n\n7\n\n", "No.", "Yes."]),
    "not of conversations that have one": ("pairs", {"question": "even", "chosen": [ASK, NO],
        "rejected": [ASK, YES]}, [said(ASK), said(NO), said(YES)]),
    "a text before messages": ("pairs", {"prompt": "Is 7 even?", "chosen": [NO], "rejected": [YES]},
        [said(ASK), said(NO), said(YES)]),
    "messages before texts": ("pairs", {"messages": [ASK], **TEXTS}, [said(ASK), said(NO), said(YES)]),
    "one message for each": ("pairs", {"conversations": [ASK], "chosen": NO,
        "rejected": {"from": "gpt", "value": "Yes."}}, [said(ASK), said(NO), said(YES)]),
    "OpenRLHF#909: the prompt again in both answers": ("pairs", {"prompt": "Is 7 even? ",
        "chosen": "Is 7 even? No.", "rejected": "Is 7 even? Yes."}, ["Is 7 even? ", "No.", "Yes."]),
    "and in a completion": ("texts", {"prompt": "Is 7 even?", "completion": "Is 7 even? No."},
        ["Is 7 even?", " No."]),
    "and in that of a conversation": ("texts", {"prompt": [ASK], "completion": [ASK, NO]},
        [said(ASK), said(NO)]),
    "one word may be chance": ("pairs", {"prompt": "I", "chosen": "I do", "rejected": "I may"},
        ["I", "I do", "I may"]),
    "mpttune#12: instruction and output, not the text that was made of them": ("texts",
        {"instruction": "Is 7 even?", "input": "", "output": "No.", "text": "### Response: No."},
        ["Is 7 even?\n\n", "No."]),
    "what a question is about": ("texts", {"context": "A number, 7.", "question": "Is it even?",
        "answer": "No."}, ["Is it even?\n\nA number, 7.\n\n", "No."]),
    "messages, not the text of the first of them": ("prompts",
        {"prompt": "Is 7 even?", "messages": [ASK, NO]}, [said(ASK)]),
    "a question alone": ("prompts", {"question": "Is 7 even?"}, ["Is 7 even?\n\n"]),
}
# fmt: on


@pytest.mark.parametrize("name", READ)
def test_a_row_is_read_by_the_names_of_its_columns(name):
    want, row, expected = READ[name]
    parsed = parse_row(row, want)
    assert (parsed.problem, contents(parsed)) == ("", expected)


@pytest.mark.parametrize(
    ("want", "row"),
    [
        ("texts", {"prompt": "Is 7 even?", "completion": "No.", "label": False}),  # TRL's KTO
        ("texts", {"messages": [ASK, NO], "weight": 0}),
        ("texts", {"text": "No.", "train": False}),
    ],
)
def test_a_row_that_its_author_excludes_is_left_out(want, row):
    assert parse_row(row, want).problem == "marked as not to be trained on"
    kept = {name: not value if name in ("label", "weight", "train") else value for name, value in row.items()}
    assert parse_row(kept, want).problem == ""


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": False}, {"masked": True}])
def test_an_answer_that_its_author_excludes_is_not_trained_on(mark, caplog):
    """axolotl#1703, verl#5472: it is read, as what the next one follows."""
    turns = [ASK, {**YES, **mark}, message("user", "Sure?"), {**NO, "weight": 1}]
    shared = [{"from": turn["role"], "value": turn["content"], **turn} for turn in turns]
    for row in ({"messages": turns}, {"conversations": shared}):
        (chat,) = parse_row(row, "texts").answers
        reader, _ = reader_of()
        ids, mask = reader.whole(chat)
        trained = [index for index, kept in zip(ids, mask, strict=True) if kept]
        assert reader.tokenizer.decode(trained) == "No.<eos>"
        assert "Yes.<eos>" in reader.tokenizer.decode(ids)
        data = TextDataModule(source="here", train_on="all")
        data.encoded(reader, Row(None, (chat,)), Selection("source", "here", "train"))
        assert "train_on=all trains also on messages that are marked" in caplog.messages.pop()


def test_a_system_message_makes_messages_of_texts_where_there_is_a_template():
    """As the setting system_prompt does; a tokenizer without a template reads the texts, and says so."""
    row = parse_row({"system": "Be brief.", "prompt": "Is 7 even?", "completion": "No."}, "texts")
    reader, said = reader_of()
    shown = reader.tokenizer.decode(reader.answered(row.prompt, *row.answers, row.system).ids)
    assert shown == "<bos><|system|>Be brief.<eos>\n<|user|>Is 7 even?<eos>\n<|assistant|>No.<eos>"
    asked = reader.tokenizer.decode(reader.answered(row.prompt, *row.answers, "").ids)
    assert asked == "<bos><|user|>Is 7 even?<eos>\n<|assistant|>No.<eos>", "rows of one file are alike"
    assert not said
    reader, said = reader_of(None)
    assert reader.answered(row.prompt, *row.answers, row.system) == reader.answered(row.prompt, *row.answers)
    assert said == ["the chat template is missing: the columns of system messages are not read"]


# fmt: off
OFFERS = [
    ("texts", {"problem": "a", "solution": "b", "id": 1}, "{prompt: problem, completion: solution}"),
    ("texts", {"prompt": "a", "response": "b"}, "{completion: response}"),
    ("texts", {"instruction": "a", "context": "c", "response": "b"}, "{completion: response}"),
    ("texts", {"data": ["a", "b"]}, "{messages: data}"),
    ("texts", {"story": "a"}, "{text: COLUMN}"),
    ("texts", {"prompt": "a", "chosen": "b", "rejected": "c"}, "{completion: chosen}"),
    ("texts", {"chosen": [ASK, NO], "rejected": [ASK, YES]}, "{messages: chosen}"),
    ("texts", {"chat": "USER: a"}, "{text: chat}"),
    ("texts", {"Prompt": "a", "COMPLETION": "b"}, "{prompt: Prompt, completion: COMPLETION}"),
    ("prompts", {"query": "a", "answer": "b"}, "{prompt: query}"),
    ("pairs", {"prompt": "a", "response_chosen": "b", "response_rejected": "c"},
        "{chosen: response_chosen, rejected: "),
    ("labels", {"review": "a", "sentiment": "positive"}, "{text: review, label: sentiment}"),
]
# fmt: on


@pytest.mark.parametrize(("want", "row", "line"), OFFERS)
def test_a_row_of_other_names_is_refused_with_the_setting_that_reads_it(want, row, line):
    problem = parse_row(row, want, columns={}).problem
    assert f"; its columns: {', '.join(row)}; add --data.columns '{line}" in problem
    assert "add" not in parse_row(row, want).problem, "commands without the setting do not offer it"
    if not line.endswith("}") or ": COLUMN}" in line:
        return
    columns = dict(part.split(": ") for part in line.strip("{}").split(", "))
    assert parse_row(row, want, columns=columns).problem == ""


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "info.post", "completion": "answers.text.0"}, ["a", "b"]),
        (
            {"prompt": "info.post", "completion": "none"},
            "no column none, which columns names; its columns: info, ",
        ),
        ({"prompt": "info.post", "completion": "answers.text.1"}, "no column answers.text.1, which columns "),
    ],
)
def test_columns_can_be_parts_of_others(columns, expected):
    row = {"info": {"post": "a"}, "answers": {"text": ["b"]}, "system": "c"}
    parsed = parse_row(row, "texts", columns={**columns, "system": None})
    assert parsed.system is None
    assert contents(parsed) == expected if isinstance(expected, list) else parsed.problem.startswith(expected)


def test_question_and_answer_are_apart_as_texts_and_messages_of_their_own():
    """The text "9 + 9?It is 18." was glued together."""
    row = parse_row({"question": "9 + 9?", "answer": "It is 18."}, "texts")
    for system, shown in (
        (None, "<bos>9 + 9?\n\nIt is 18.<eos>"),
        ("Add", "<bos><|system|>Add<eos>\n<|user|>9 + 9?<eos>\n<|assistant|>It is 18.<eos>"),
    ):
        reader, _ = reader_of(system_prompt=system)
        assert reader.tokenizer.decode(reader.answered(row.prompt, *row.answers).ids) == shown


def test_special_tokens_of_the_users_own_are_text():
    """trl#4521, trl#2897: conversations with <think> were all left out, and rewards did not read it."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    reader = Reader("key", tokenizer, [tokenizer.eos_token_id])
    answer = "<think>so</think> No."
    ids, mask = reader.whole(chat_of("Is 7 even?", answer))
    trained = [index for index, kept in zip(ids, mask, strict=True) if kept]
    assert tokenizer.convert_tokens_to_ids("<think>") in trained
    assert decoded([ids, trained], tokenizer, reader.controls) == [f"Is 7 even?\n{answer}", answer]
    with pytest.raises(LeftOutError, match="control token <\\|user"):
        reader.whole(chat_of("<|user|>", answer))
    writes = TEMPLATE.replace(
        "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think>{% endif %}{{ m['content'] }}"
    )
    tokenizer.chat_template = writes
    with pytest.raises(LeftOutError, match="control token <think"):
        Reader("key", tokenizer, []).whole(chat_of("Is 7 even?", answer))


def test_what_a_template_puts_before_an_answer_is_not_trained_on():
    """Automodel#3739: a thinking model would learn not to think."""
    empty = "{% if m['role'] == 'assistant' %}<t>\n</t>\n{% endif %}"
    jinja = TEMPLATE.replace("{{ m['content'] }}", f"{empty}{{{{ m['content'] }}}}")
    reader, said = reader_of(jinja)
    ids, mask = reader.whole(chat_of("Q", "t"))
    assert reader.tokenizer.decode(ids) == "<bos><|user|>Q<eos>\n<|assistant|><t>\n</t>\nt<eos>"
    assert [index for index, kept in zip(ids, mask, strict=True) if kept] == ids[-2:]
    assert said == ["the chat template puts '<t>\\n</t>' before answers, which is not trained on"]


def test_a_prompt_without_a_generation_prompt_is_said():
    """instructlab/training#232: RLOO and distillation were silent."""
    for jinja, count in ((TEMPLATE, 0), (TEMPLATE.partition("{% if add")[0], 1)):
        reader, said = reader_of(jinja)
        for _ in range(2):
            reader.prompt(chat_of("Hi"))
            reader.prompt(chat_of("Hi", "Yes"))
        assert len(said) == count
        assert not said or said[0].startswith("the chat template has no generation prompt")


def test_a_template_without_system_messages_refuses_the_setting():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    with pytest.raises(ConfigurationError, match=r"^system_prompt: system messages are not possible: "):
        reader_of(refuses, system_prompt="Be brief.")
