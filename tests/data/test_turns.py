"""Answers in conversations: all of them are trained on, with their ends, and nothing else."""

from itertools import groupby

import pytest
from chat_tokenizer import TEMPLATE, chat_of, message, reader_of

from lit_klrb.data.chat import Conversation, LeftOutError

CALLS = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content }}"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def called(arguments="", **more):
    call = {"function": {"name": "add", "arguments": {"a": arguments}}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def test_neither_calls_nor_thoughts_nor_tools_are_control_tokens():
    """A call to send "<eos>" would end the answer at that place."""
    reader, _ = reader_of(CALLS)
    names = {"role": "assistant", "content": "", "tool_calls": [{"function": {"<eos>": 1}}]}
    for answer in (called("x<eos>y"), called(reasoning_content="<|user|>"), names):
        chat = Conversation.read("row 1", [message("user", "Hi"), answer])
        with pytest.raises(LeftOutError, match="a message contains the control token <"):
            reader.whole(chat)
        with pytest.raises(LeftOutError, match="a message contains the control token <"):
            reader.prompt(chat)
    tools = [{"name": "add", "description": ["ends with <eos>"]}]
    with pytest.raises(LeftOutError, match="tools contain the control token <eos>"):
        reader.whole(chat_of("Hi", "Yes", tools=tools))


def answers_of(reader, encoded):
    """The texts that are trained on, one for each run of tokens."""
    runs = groupby(zip(*encoded, strict=True), key=lambda pair: pair[1])
    return [reader.tokenizer.decode([index for index, _ in run]) for kept, run in runs if kept]


LAST = "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}"
THINKS = "{% if loop.last and m.role == 'assistant' %}<t>{{ 'so ' * 9 }}</t>{% endif %}"


@pytest.mark.parametrize(
    ("end", "before", "turn", "last"),
    [
        # Qwen2.5's base model: the end of a turn is not among the ends of its completions
        ("<|system|>\n", "", "<|system|>\n", "<|system|>\n<eos>"),
        # The only end that follows an answer is that of the user's next turn
        (
            "{{ eos_token if m.role == 'user' else '<|system|>' }}",
            *("", "<|system|>", "<|system|><eos>"),
        ),
        # The EOS is written at the very end only
        (LAST, "", "", "<eos>"),
        # It is written only where a message follows
        ("{% if not loop.last or add_generation_prompt %}{{ eos_token }}{% endif %}", "", "<eos>", "<eos>"),
        # Thoughts of earlier turns are gone, with and without the end of a turn
        ("<|system|>\n", THINKS, "<|system|>\n", "<|system|>\n<eos>"),
        ("{{ eos_token }}\n", THINKS, "<eos>", "<eos>"),
    ],
)
def test_what_is_trained_on_are_answers_whatever_ends_them(end, before, turn, last):
    """Not the user's turns between them, for templates of turns that end without an end of a completion."""
    jinja = TEMPLATE.replace("{{ m['content'] }}{{ eos_token }}\n", before + "{{ m['content'] }}" + end)
    assert jinja != TEMPLATE
    reader, said = reader_of(jinja)
    encoded = reader.whole(chat_of("Q1", "A1", "1", "A2", "Q3", "A3"))
    assert answers_of(reader, encoded) == [f"A1{turn}", f"A2{turn}", f"A3{last}"]
    assert ("puts" in " ".join(said)) == bool(before), "thoughts that are the template's are no answer"
    encoded = reader.whole(chat_of("Q1", "A1", "Q2"))
    assert answers_of(reader, encoded) == [f"A1{turn}" + "<eos>" * ("<eos>" not in turn)], "up to the answer"
    once = reader.whole(chat_of("Q1", "A1"))
    assert answers_of(reader, once) == [f"A1{last}"]


def test_where_an_answer_ends_may_be_unknown():
    """Thoughts, with which an answer would reach into the user's turn, are gone, and so is the only EOS."""
    jinja = TEMPLATE.replace("{{ m['content'] }}{{ eos_token }}\n", THINKS + "{{ m['content'] }}" + LAST)
    reader, said = reader_of(jinja)
    encoded = reader.whole(chat_of("Q1", "A1", "Q2", "A2"))
    assert answers_of(reader, encoded) == ["A2<eos>"]
    assert said[:2] == [
        "the chat template changes an answer once there are later messages",
        "the chat template does not show where an answer ends before later messages; it is not trained on",
    ]


def test_all_answers_of_a_completion_are_trained_on():
    """As in TRL, after the prompt; what tools return is read and not trained on."""
    reader, _ = reader_of(CALLS)
    completion = [called("2"), message("tool", "42"), message("assistant", "It is 42")]
    earlier = chat_of("Q", "A", "Q2")
    encoded = reader.answered(earlier, Conversation.read("row 1", completion))
    call = '[{"function": {"name": "add", "arguments": {"a": "2"}}}]'
    assert answers_of(reader, encoded) == [f"{call}<eos>", "It is 42<eos>"]
    text = f"<|user|>Q<eos>\n<|assistant|>A<eos>\n<|user|>Q2<eos>\n<|assistant|>{call}<eos>\n"
    assert reader.tokenizer.decode(encoded.ids) == f"{text}<|tool|>42<eos>\n<|assistant|>It is 42<eos>"
    with pytest.raises(LeftOutError, match="no answer"):
        reader.answered(earlier, Conversation.read("row 1", [message("user", "Yes")]))


def test_empty_answers_are_counted_as_such_in_conversations():
    """They would be trained as an end alone; a call without a text is an answer."""
    reader, _ = reader_of(CALLS)
    for content in ("", " \n"):
        empty = Conversation.read("row 1", [message("assistant", content)])
        for read in (
            lambda empty=empty: reader.answered(chat_of("Hi"), empty),
            lambda empty=empty: reader.classified(chat_of("Hi"), empty),
            lambda content=content: reader.whole(chat_of("Hi", content, "So?", "Yes")),
            lambda content=content: reader.whole(chat_of("Hi", content), answers_only=False),
        ):
            with pytest.raises(LeftOutError, match=r"^empty$"):
                read()
    call = Conversation.read("row 1", [message("user", "Hi"), called("2")])
    (answer,) = answers_of(reader, reader.whole(call))
    assert answer == '[{"function": {"name": "add", "arguments": {"a": "2"}}}]<eos>'
    blind, said = reader_of()
    with pytest.raises(LeftOutError, match="no answer"):
        blind.whole(call)
    assert said == ["the chat template writes nothing of an answer; its end is not trained on"]


def test_a_first_message_of_the_assistant_is_trained_on():
    """Role plays and ShareGPT have them; where the template does not show its beginning, a line says so."""
    roles = {"Hello": "assistant", "Q": "user", "A": "assistant"}
    chat = Conversation.read("row 1", [message(role, content) for content, role in roles.items()])
    reader, said = reader_of()
    encoded = reader.whole(chat)
    assert (answers_of(reader, encoded), said) == (["Hello<eos>", "A<eos>"], [])
    alone = Conversation.read("row 1", [message("assistant", "Hello")])
    assert answers_of(reader, reader.whole(alone)) == ["Hello<eos>"]
    needs_user = "{% if messages | length == 1 %}{{ raise_exception('no user') }}{% endif %}"
    line = "does not show where a first message of the assistant begins; it is not trained on"
    for jinja in (needs_user + TEMPLATE, TEMPLATE.partition("{% if add")[0]):
        reader, said = reader_of(jinja)
        assert answers_of(reader, reader.whole(chat))[0].endswith("A<eos>")
        assert said[0] == f"the chat template {line}"
        assert said[0] not in said[1:]
