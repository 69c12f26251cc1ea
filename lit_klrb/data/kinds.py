"""Kinds of rows, as TRL has them: language modelling, prompt and completion, prompt, preference, labelled.

Each is read from a row by its columns. Relatives of these forms are converted, which one line says.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lit_klrb.data.chat import ASSISTANT, USER, Conversation, is_unicode, shown, without_none
from lit_klrb.data.rows import RawRow
from lit_klrb.errors import ConfigurationError, refusing

TEXT, PROMPT, MESSAGES, COMPLETION = "text", "prompt", "messages", "completion"
CHOSEN, REJECTED = "chosen", "rejected"
# The column with what the teacher, or the reference, reads instead of the prompt.
TEACHER_PROMPT = "teacher_prompt"
LAST = "\n\nAssistant:"  # where the answer of a dialogue in one text begins
WORDS = "the words with which both begin"
SPEAKERS = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
# The columns of forms that are converted to those above
CONVERTIBLE = ({"conversations"}, {"conversation"}, {"question", "answer"}, {"instruction", "output"})
LABELS: dict[Any, int | None] = {0: 0, 1: 1, -1: None, None: None}  # on the hub, -1 marks an unknown label
TEXT_LABELS = {"0": 0, "1": 1, "-1": -1, "0.0": 0, "1.0": 1, "-1.0": -1, "false": 0, "true": 1}

Content = str | Conversation
# What a stage reads of a row: texts to model, prompts, preferences, pairs (preferences that need a prompt),
# or texts with labels.
Want = Literal["texts", "prompts", "preferences", "pairs", "labels"]
# Columns that models of text do not read.
MEDIA = "image", "images", "audio", "video", "videos"
CLEANED = "<br /> tags, misread characters, or spaces at the ends of text are repaired"
log = logging.getLogger(__name__)


class LeftOutError(ValueError):
    """A row that cannot be read as a whole; the message is the reason, which is counted."""


@dataclass(frozen=True)
class Row:
    """What a stage reads of a row."""

    prompt: Content | None  # what answers follow, used as a whole; None for whole texts
    # The text or conversation; the completion; or the chosen and the rejected one
    answers: tuple[Content, ...] = ()
    label: int | None = None  # 1 positive, 0 negative, None unknown
    # The other columns of the row, which reach rewards
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False, repr=False)  # where it comes from, for messages
    problem: str = ""  # why it is left out, of a row that is not read further

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


def parse_rows(key: str, place: str, rows: Sequence[RawRow], want: Want) -> list[Row]:
    """The rows of a table."""
    parsed, said = [], Counter[str]()
    for number, raw in enumerate(rows, 1):
        row, note = converted(raw, want)
        parsed.append(_parsed(_Raw(key, f"{place} row {number}", row), want))
        said.update([note] if note else [])
        is_read = row.get(TEXT) and TEXT not in parsed[-1].columns and not parsed[-1].problem
        said.update([CLEANED] if is_read and row[TEXT] != parsed[-1].text else [])
    for name in (name for name in MEDIA if any(row.get(name) for row in rows)):
        log.warning("%s: models do not read the column %s, as they are of text alone", place, name)
    for note, count in said.items():
        log.warning("%s: converted %d of %d rows: %s", place, count, len(parsed), note)
    return parsed


def _parsed(raw: "_Raw", want: Want) -> Row:
    with refusing(f"{raw.place} cannot be read", RecursionError, key=raw.key):
        try:
            return READ[want](raw)
        except LeftOutError as problem:
            return Row("", place=raw.place, problem=str(problem))


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
            messages = [message for turn in turns for message in _messages(turn)]
            return row | {MESSAGES: messages}, "conversations are messages"
        if {"question", "answer"} <= has:
            own = {PROMPT: row["question"], COMPLETION: row["answer"]}
            return row | own, "question and answer are prompt and completion"
        if {"instruction", "output"} <= has:
            parts = [str(row[name]) for name in ("instruction", "input") if row.get(name)]
            own = {PROMPT: "\n\n".join([*parts, ""]), COMPLETION: row["output"]}
            return row | own, "instruction, input and output are prompt and completion"
    pair = [text for text in (row.get(CHOSEN), row.get(REJECTED)) if isinstance(text, str)]
    if want == "texts" or PROMPT in has or len(pair) < 2:
        return row, ""
    length, what = _beginning(*pair)
    # Whole texts of a reward model need no prompt
    if not length or (what == WORDS and want == "preferences"):
        return row, ""
    rest = {name: row[name][length:] for name in (CHOSEN, REJECTED)}
    return {**row, PROMPT: row[CHOSEN][:length], **rest}, f"the prompt of a pair is {what}"


def _beginning(one: str, other: str) -> tuple[int, str]:
    """The length of the prompt with which two texts begin, and what it is; 0 without one."""
    differ = (n for n, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1)
    common = one[: next(differ, len(other))]
    if LAST in common:
        return common.rfind(LAST) + len(LAST), f"what both have up to the last {LAST.strip()!r}"
    return max(0, *map(common.rfind, " \n")), WORDS  # the space belongs to the answer


def _messages(turn: Mapping[str, Any]) -> list[RawRow]:
    """The messages of a turn of ShareGPT, of a question with its answer, or of a message itself."""
    if {"from", "value"} <= turn.keys():
        return [{"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn["value"]}]
    if {"input", "output"} <= turn.keys():
        return [{"role": USER, "content": turn["input"]}, {"role": ASSISTANT, "content": turn["output"]}]
    return [dict(turn)]


class _Raw(NamedTuple):
    """A row in one of the forms above, with the argument and the place that error messages name."""

    key: str
    place: str
    row: RawRow

    def has(self, *names: str) -> bool:
        """Whether the row has values in these columns."""
        return all(self.row.get(name) not in (None, []) for name in names)

    def lacks(self, *forms: set[str]) -> bool:
        """Whether the row has the columns of a form or of a relative, but not their values."""
        present = self.row.keys()
        return any(form <= present and not self.has(*form) for form in (*forms, *CONVERTIBLE))

    def content(self, name: str, wanted: str = "") -> Content:
        """The text or the conversation in a column; empty without a value, as a row is left out then."""
        if name not in self.row:
            columns = ", ".join(self.row) or "none"
            raise self.error(f" has no column {wanted or name}; its columns: {columns}")
        value = self.row[name] if self.has(name) else ""
        if isinstance(value, list) or (name == MESSAGES and value):
            place = self.place if name in (PROMPT, MESSAGES) else f"{self.place}, {name},"
            return Conversation.read(self.key, place, value, without_none(self.row.get("tools")))
        if not isinstance(value, str) or not is_unicode(value):
            raise self.error(f" has the {name} {shown(value)}; a text of Unicode characters is expected")
        return value

    def parsed(self, prompt: Content | None, answers: Sequence[Content], *names: str) -> Row:
        """The row, without the columns that became prompt and answers."""
        if len({isinstance(content, str) for content in (prompt, *answers) if content is not None}) > 1:
            raise self.error(
                " has a text beside a list of messages; both are expected to be of the same form"
            )
        columns = {name: value for name, value in self.row.items() if name not in names}
        return Row(prompt, tuple(answers), None, columns, self.place)

    def error(self, problem: str) -> ConfigurationError:
        """The error of a row with a problem."""
        return ConfigurationError(f"{self.place}{problem}", key=self.key)


def _text_row(raw: _Raw) -> Row:
    if raw.has(MESSAGES):
        return raw.parsed(None, [raw.content(MESSAGES)], MESSAGES)
    if raw.has(PROMPT, COMPLETION):
        return raw.parsed(raw.content(PROMPT), [raw.content(COMPLETION)], PROMPT, COMPLETION)
    if TEXT not in raw.row and raw.lacks({MESSAGES}, {PROMPT, COMPLETION}):
        return raw.parsed(None, [""])
    return _plain_row(raw, "text, messages, or prompt and completion")


def _plain_row(raw: _Raw, wanted: str = TEXT) -> Row:
    text = raw.content(TEXT, wanted)
    if not isinstance(text, str):
        raise raw.error(": conversations belong in the column messages")
    return raw.parsed(None, [clean_text(text)], TEXT)


def _labelled_row(raw: _Raw) -> Row:
    label = raw.row.get("label")
    if isinstance(label, str):  # a table in text has texts alone
        label = TEXT_LABELS.get(label.lower(), label)
    if not isinstance(label, (int, float, type(None))) or label not in LABELS:
        raise raw.error(f" has the label {shown(label)}; allowed: 1, 0, and -1 for unknown")
    return replace(_plain_row(raw), label=LABELS[label])


def _prompt_row(raw: _Raw) -> Row:
    # A text beside conversations, as in ultrafeedback, is their first message
    is_copy = isinstance(raw.row.get(PROMPT), str) and isinstance(raw.row.get(CHOSEN), list)
    if raw.has(CHOSEN, REJECTED) and (is_copy or not raw.has(PROMPT)):
        return raw.parsed(_preference_row(raw).prompt, (), PROMPT)
    if PROMPT in raw.row:
        return raw.parsed(raw.content(PROMPT), (), PROMPT)
    if raw.has(MESSAGES):
        chat = raw.content(MESSAGES)
        assert isinstance(chat, Conversation)
        *before, last = chat.messages
        if last["role"] == ASSISTANT and not before:
            raise LeftOutError("no message before the assistant's")
        chat = replace(chat, messages=tuple(before)) if last["role"] == ASSISTANT else chat
        return raw.parsed(chat, (), MESSAGES)
    if TEXT not in raw.row and raw.lacks({MESSAGES}, {CHOSEN, REJECTED}):
        return raw.parsed("", ())
    return _plain_row(raw, "prompt, messages or text")


def _preference_row(raw: _Raw) -> Row:
    first, second = (raw.content(name) for name in (CHOSEN, REJECTED))
    if not raw.has(CHOSEN, REJECTED):
        return raw.parsed("", ["", ""], PROMPT, CHOSEN, REJECTED)
    chats = isinstance(first, Conversation) and isinstance(second, Conversation)
    is_given = raw.has(PROMPT) and not (chats and isinstance(raw.row[PROMPT], str))
    prompt, answers = raw.content(PROMPT) if is_given else None, [first, second]
    if isinstance(first, Conversation) and isinstance(second, Conversation):
        prompt, *answers = _shared(raw, prompt, first, second)
    return raw.parsed("" if prompt is None else prompt, answers, PROMPT, CHOSEN, REJECTED)


def _shared(raw: _Raw, given: Content | None, *chats: Conversation) -> list[Content]:
    """The messages before the answers of two conversations, and the answers."""
    for name, chat in zip((CHOSEN, REJECTED), chats, strict=True):
        if (role := chat.messages[-1]["role"]) != ASSISTANT:
            raise raw.error(f", {name}, ends with the role {role}; the assistant's answer is expected")
    before = [chat.messages[:-1] for chat in chats]
    answers = [replace(chat, messages=chat.messages[-1:]) for chat in chats]
    if isinstance(given, Conversation) and all(part in ((), given.messages) for part in before):
        return [replace(given, place=raw.place), *answers]
    prefix = given.messages if isinstance(given, Conversation) else ()
    after = [part[len(prefix) :] if part[: len(prefix)] == prefix else part for part in before]
    if prefix and any(part[0]["role"] == ASSISTANT for part in after if part):
        raise LeftOutError("several messages after the prompt")
    if given is not None or before[0] != before[1]:
        raise LeftOutError("conversations that differ before the answer")
    if not before[0]:
        raise LeftOutError("no message before the assistant's")
    return [replace(chats[0], messages=before[0], place=raw.place), *answers]


READ = {
    "texts": _text_row,
    "prompts": _prompt_row,
    "preferences": _preference_row,
    "pairs": _preference_row,
    "labels": _labelled_row,
}


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
