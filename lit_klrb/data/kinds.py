"""Kinds of rows, as TRL has them: language modelling, prompt and completion, prompt, preference, labelled.

Each is read from a row by its columns. Relatives of these forms are converted, which one line says.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

from lit_klrb.data.chat import ASSISTANT, USER, Conversation, is_unicode, shown
from lit_klrb.data.rows import RawRow
from lit_klrb.errors import ConfigurationError

TEXT, PROMPT, MESSAGES, COMPLETION = "text", "prompt", "messages", "completion"
CHOSEN, REJECTED = "chosen", "rejected"
# The column with what the teacher, or the reference, reads instead of the prompt.
TEACHER_PROMPT = "teacher_prompt"
LAST = "\n\nAssistant:"  # where the answer of a dialogue in one text begins
SPEAKERS = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
LABELS: dict[Any, int | None] = {0: 0, 1: 1, -1: None, None: None}  # on the hub, -1 marks an unknown label

Content = str | Conversation
# What a stage reads of a row: texts to model, prompts, preferences, or texts with labels.
Want = Literal["texts", "prompts", "preferences", "labels"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """What a stage reads of a row.

    Args:
        prompt: What answers follow; None for whole texts.
        answers: The text or conversation; the completion; or the chosen and the rejected one.
        label: 1 positive, 0 negative, None unknown.
        columns: The other columns of the row, which reach rewards.
        place: Where it comes from, for messages.
    """

    prompt: Content | None
    answers: tuple[Content, ...] = ()
    label: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False, repr=False)

    @property
    def text(self) -> str:
        """What identifies the row: its prompt, or its whole text; for conversations a hash."""
        content = self.answers[0] if self.prompt is None else self.prompt
        return content if isinstance(content, str) else content.identity()

    @property
    def words(self) -> str:
        """All that is read of the row as one text, for the training of a tokenizer."""
        contents = [content for content in (self.prompt, *self.answers) if content is not None]
        parts = [[c] if isinstance(c, str) else [m["content"] for m in c.messages] for c in contents]
        return "".join(text for part in parts for text in part)

    @property
    def is_prompt(self) -> bool:
        """Whether it has a prompt, which is used as a whole."""
        return self.prompt is not None


def parse_rows(key: str, place: str, rows: Sequence[RawRow], want: Want) -> list[Row]:
    """The rows of a table.

    Raises:
        ConfigurationError: If a row has another form; names its number and its columns.
    """
    parsed, said = [], Counter[str]()
    for number, raw in enumerate(rows, 1):
        row, note = converted(raw, want)
        said.update([note] if note else [])
        parsed.append(READ[want](key, f"{place} row {number}", row))
    for note, count in said.items():
        log.warning("%s: converted %d of %d rows: %s", place, count, len(parsed), note)
    return parsed


def converted(row: RawRow, want: Want) -> tuple[RawRow, str]:
    """A row in one of the forms above, and how it became so; empty if it has not changed.

    Example:
        >>> row, note = converted({"question": "2+2?", "answer": "4"}, "texts")
        >>> row["prompt"], row["completion"], note
        ('2+2?', '4', 'question and answer are prompt and completion')
    """
    has = {name for name, value in row.items() if value is not None}
    if not has & {MESSAGES, PROMPT, TEXT, CHOSEN}:
        turns = row.get("conversations") or row.get("conversation")
        if isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns):
            return {**row, MESSAGES: [message for turn in turns for message in _messages(turn)]}, (
                "conversations are messages"
            )
        if {"question", "answer"} <= has:
            note = "question and answer are prompt and completion"
            return {**row, PROMPT: row["question"], COMPLETION: row["answer"]}, note
        if {"instruction", "output"} <= has:
            parts = [str(row[name]) for name in ("instruction", "input") if row.get(name)]
            note = "instruction, input and output are prompt and completion"
            return {**row, PROMPT: "\n\n".join([*parts, ""]), COMPLETION: row["output"]}, note
    pair = [row.get(CHOSEN), row.get(REJECTED)]
    if want != "texts" and PROMPT not in has and all(isinstance(text, str) for text in pair):
        both = zip(*map(str, pair), strict=False)
        same = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], both))
        length = str(pair[0])[:same].rfind(LAST) + len(LAST)
        if length >= len(LAST):
            rest = {name: row[name][length:] for name in (CHOSEN, REJECTED)}
            note = f"the prompt of a dialogue is what both have up to the last {LAST.strip()!r}"
            return {**row, PROMPT: row[CHOSEN][:length], **rest}, note
    return row, ""


def _messages(turn: Mapping[str, Any]) -> list[RawRow]:
    """The messages of a turn of ShareGPT, of a question with its answer, or of a message itself."""
    if {"from", "value"} <= turn.keys():
        return [{"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn["value"]}]
    if {"input", "output"} <= turn.keys():
        both = ((USER, turn["input"]), (ASSISTANT, turn["output"]))
        return [{"role": role, "content": content} for role, content in both]
    return [dict(turn)]


def _others(row: RawRow, *names: str) -> RawRow:
    return {name: value for name, value in row.items() if name not in names}


def _content(key: str, place: str, row: RawRow, name: str) -> Content:
    """A text or a conversation."""
    value = row[name]
    if isinstance(value, list) or name == MESSAGES:
        return Conversation.read(
            key, f"{place}" if name in (PROMPT, MESSAGES) else f"{place}, {name},", value, row.get("tools")
        )
    if not isinstance(value, str) or not is_unicode(value):
        raise ConfigurationError(
            f"{place} has the {name} {shown(value)}; a text of Unicode characters is expected", key=key
        )
    return value


def _refuse(key: str, place: str, row: RawRow, wanted: str) -> ConfigurationError:
    columns = ", ".join(row) or "none"
    return ConfigurationError(f"{place} has no column {wanted}; its columns: {columns}", key=key)


def _has(row: RawRow, *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


def _text_row(key: str, place: str, row: RawRow) -> Row:
    if _has(row, MESSAGES):
        return Row(None, (_content(key, place, row, MESSAGES),), None, _others(row, MESSAGES), place)
    if _has(row, PROMPT, COMPLETION):
        prompt, answer = (_content(key, place, row, name) for name in (PROMPT, COMPLETION))
        _check_same(key, place, prompt, answer)
        return Row(prompt, (answer,), None, _others(row, PROMPT, COMPLETION), place)
    return _plain_row(key, place, row, "text, messages, or prompt and completion")


def _plain_row(key: str, place: str, row: RawRow, wanted: str) -> Row:
    if TEXT not in row:
        raise _refuse(key, place, row, wanted)
    text = _content(key, place, row, TEXT)
    if not isinstance(text, str):
        raise ConfigurationError(f"{place}: conversations belong in the column messages", key=key)
    return Row(None, (clean_text(text),), None, _others(row, TEXT), place)


def _labelled_row(key: str, place: str, row: RawRow) -> Row:
    label = row.get("label")
    if not isinstance(label, (int, float, type(None))) or label not in LABELS:
        problem = f"{place} has the label {shown(label)}; allowed: 1, 0, and -1 for unknown"
        raise ConfigurationError(problem, key=key)
    return replace(_plain_row(key, place, row, TEXT), label=LABELS[label])


def _prompt_row(key: str, place: str, row: RawRow) -> Row:
    alone = PROMPT not in row or (isinstance(row[PROMPT], str) and isinstance(row.get(CHOSEN), list))
    if _has(row, CHOSEN, REJECTED) and alone:
        return replace(_preference_row(key, place, row), answers=(), columns=_others(row, PROMPT))
    if PROMPT in row:
        return Row(_content(key, place, row, PROMPT), (), None, _others(row, PROMPT), place)
    if _has(row, MESSAGES):
        chat = _content(key, place, row, MESSAGES)
        assert isinstance(chat, Conversation)
        return Row(chat.before_answer(key), (), None, _others(row, MESSAGES), place)
    return _plain_row(key, place, row, "prompt, messages or text")


def _preference_row(key: str, place: str, row: RawRow) -> Row:
    for name in (CHOSEN, REJECTED):
        if name not in row:
            raise _refuse(key, place, row, name)
    first, second = (_content(key, place, row, name) for name in (CHOSEN, REJECTED))
    others = _others(row, PROMPT, CHOSEN, REJECTED)
    if isinstance(first, Conversation) and isinstance(second, Conversation):
        beginning = (
            Conversation.read(key, f"{place}, prompt,", row[PROMPT], row.get("tools"))
            if isinstance(row.get(PROMPT), list)
            else None
        )
        before, *answers = _shared(key, place, beginning, first, second)
        return Row(before, tuple(answers), None, others, place)
    prompt = _content(key, place, row, PROMPT) if _has(row, PROMPT) else ""
    _check_same(key, place, first, second)
    _check_same(key, place, prompt, first)
    return Row(prompt, (first, second), None, others, place)


def _shared(
    key: str, place: str, beginning: Conversation | None, *chats: Conversation
) -> tuple[Conversation, Conversation, Conversation]:
    """The messages before the answers of two conversations, and the answers."""
    for name, chat in zip((CHOSEN, REJECTED), chats, strict=True):
        if chat.last_role != ASSISTANT:
            problem = f"{name}, ends with the role {chat.last_role}; the assistant's answer is expected"
            raise ConfigurationError(f"{place}, {problem}", key=key)
    before = [chat.messages[:-1] for chat in chats]
    answers = [replace(chat, messages=chat.messages[-1:]) for chat in chats]
    if beginning is not None and all(part in ((), beginning.messages) for part in before):
        return (replace(beginning, place=place), *answers)  # type: ignore[return-value]
    if beginning is not None or before[0] != before[1]:
        problem = "a chosen and a rejected conversation that differ before the answer"
        raise ConfigurationError(f"{place} has {problem}", key=key)
    if not before[0]:
        raise ConfigurationError(f"{place} has no message before the assistant's", key=key)
    return (replace(chats[0], messages=before[0], place=place), *answers)  # type: ignore[return-value]


def _check_same(key: str, place: str, first: Content, second: Content) -> None:
    if isinstance(first, str) != isinstance(second, str):
        problem = "a text beside a list of messages; both are expected to be of the same form"
        raise ConfigurationError(f"{place} has {problem}", key=key)


READ = {"texts": _text_row, "prompts": _prompt_row, "preferences": _preference_row, "labels": _labelled_row}


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
