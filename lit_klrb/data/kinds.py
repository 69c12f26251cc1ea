"""Kinds of rows, as TRL has them: language modelling, prompt and completion, prompt, preference, labelled.

Which of them a row is follows from the names of its columns, which the tables below have. What is converted,
and columns that nothing reads, are said.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_klrb.data.answers import alike, split_chats, split_texts, without_repeats
from lit_klrb.data.chat import (
    JOINT,
    MARKS,
    Content,
    Conversation,
    LeftOutError,
    is_left_alone,
    is_unicode,
    kind_of,
    listed,
    shown,
    without_none,
)
from lit_klrb.data.columns import (
    ANSWERED,
    ASKED,
    BESIDE,
    CHATS,
    CHOSEN,
    COMPLETION,
    FORMS,
    LABEL,
    PAIR,
    PLAIN,
    PROMPT,
    SYSTEMS,
    TALKS,
    TEXT,
    UNHEARD,
    Columns,
    Form,
    Want,
    lacking,
    renamed,
)
from lit_klrb.data.rows import RawRow, clean_text

LABELS: dict[Any, int | None] = {0: 0, 1: 1, -1: None, None: None}  # on the hub, -1 marks an unknown label
TEXT_LABELS = {"0": 0, "1": 1, "-1": -1, "0.0": 0, "1.0": 1, "-1.0": -1, "false": 0, "true": 1}
TEXT_LABELS |= {"negative": 0, "positive": 1, "neg": 0, "pos": 1}
NOTHING: tuple[Any, ...] = (None, "", [], {})

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """What a stage reads of a row."""

    prompt: Content | None  # what answers follow, used as a whole; None for whole texts
    # The text or conversation; the completion; or the chosen and the rejected one
    answers: tuple[Content, ...] = ()
    label: int | None = None  # 1 positive, 0 negative, None unknown
    # The other columns of a prompt's row, which reach rewards
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    origin: str = field(default="", compare=False, repr=False)  # where it comes from, for messages
    problem: str = ""  # why it is left out, of a row that is not read further
    # The system message before texts, which are messages then; None if the row has no column of that name
    system: str | None = None
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)  # how it was converted
    unread: tuple[str, ...] = field(default=(), compare=False, repr=False)  # names of columns

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


def parse_row(row: RawRow, want: Want, origin: str = "", columns: Columns | None = None) -> Row:
    r"""What a stage reads of a row; columns are None without such a setting.

    Example:
        >>> row = parse_row({"question": "2+2?", "answer": "4"}, "texts")
        >>> row.prompt, row.answers, row.notes
        ('2+2?\n\n', ('4',), ('question and answer are prompt and completion',))
        >>> row = {"problem": "2+2?", "solution": "4"}
        >>> parse_row(row, "texts", columns={"prompt": "problem", "completion": "solution"}).answers
        ('4',)
    """
    try:
        return _Reading(row, want, origin, columns).parsed()
    except (RecursionError, LeftOutError) as error:
        problem = str(error) if isinstance(error, LeftOutError) else "nested too deeply"
        return Row("", origin=origin, problem=problem)


def parse_rows(source: str, rows: Iterable[RawRow], want: Want) -> list[Row]:
    """The rows of a table, in order."""
    parsed = [parse_row(row, want, f"{source} row {number}") for number, row in enumerate(rows, 1)]
    say(source, parsed)
    return parsed


def say(source: str, rows: Sequence[Row], said: set[str] | None = None) -> None:
    """Say how rows are converted, and which of their columns are not read, unless it was said."""
    said = set() if said is None else said
    for note, count in Counter(note for row in rows for note in row.notes).items():
        if note not in said:
            log.warning("%s: converted %d of %d rows: %s", source, count, len(rows), note)
        said.add(note)
    if unread := [name for name in dict.fromkeys(n for row in rows for n in row.unread) if name not in said]:
        more = f" and {len(unread) - 9} more" if len(unread) > 9 else ""
        log.warning("%s: columns that are not read: %s%s", source, ", ".join(unread[:9]), more)
        said.update(unread)


class _Reading:
    """Reads a row, and remembers which columns it reads and how it converts them."""

    def __init__(self, row: RawRow, want: Want, origin: str, columns: Columns | None) -> None:
        self.row, self.want, self.origin, self.columns = renamed(row, columns or {}), want, origin, columns
        self.used = {str(path).partition(".")[0] for path in (columns or {}).values()}
        self.notes = dict[str, None]()  # in their order
        others = (COMPLETION, *PAIR) if want == "prompts" else ()
        for name, path in (columns or {}).items():
            if path is not None and name not in (*self.row, *others):
                raise LeftOutError(f"no column {path}, which columns names; its columns: {', '.join(row)}")
        for name in (PROMPT, COMPLETION, *PAIR, *CHATS):
            value = self.row.get(name)
            if isinstance(value, str) and (messages := listed(value)) is not None:
                self.row[name] = messages
                self.note("lists of messages that are written as text are messages")

    def note(self, line: str) -> None:
        self.notes[line] = None

    def first(self, *names: str) -> str | None:
        """The first of these columns that has a value."""
        return next((name for name in names if self.row.get(name) not in (None, [])), None)

    def parsed(self) -> Row:
        """The row, in the first form of its stage that has values."""
        form = self.form()
        prompt, answers = self.contents(form)
        if self.want == "prompts" and form != PLAIN:
            prompt, answers = answers[0].before_answer() if form in TALKS else prompt, []
        elif self.want == "texts":
            self.check_trained(form)
        label = self.label() if self.want == "labels" else None
        # The system message is before the prompt, or before a whole conversation
        first, system = self.with_system(answers[0] if prompt is None else prompt, form)
        prompt, answers = (None, [first, *answers[1:]]) if prompt is None else (first, answers)
        kept = self.row if self.want == "prompts" else {}
        columns = {name: kept[name] for name in kept if name != PROMPT and (name,) != form}
        names = [name for name in (UNHEARD if self.want == "prompts" else self.row) if name not in self.used]
        unread = tuple(name for name in names if name and self.row.get(name) not in NOTHING)
        return Row(prompt, tuple(answers), label, columns, self.origin, "", system, tuple(self.notes), unread)

    def contents(self, form: Form) -> tuple[Any, list[Any]]:
        """The prompt, None for whole texts and conversations, and the answers."""
        if form in TALKS:
            return None, [self.content(form[0])]
        if form == PLAIN:
            return None, [self.plain()]
        prompt, *answers = self.pair() if form == PAIR else self.answered(*form)
        return prompt, answers

    def form(self) -> Form:
        """The columns that are read."""
        if self.want == "prompts" and self.first(PROMPT):
            talks = self.first(*CHATS) or isinstance(self.row.get(CHOSEN), list)
            if not talks or not isinstance(self.row[PROMPT], str):
                return (PROMPT,)  # a text beside a conversation is a part of it
        forms = FORMS[self.want]
        if form := next((form for form in forms if all(map(self.first, form))), None):
            return form
        if any(self.row.keys() >= {*form} for form in forms):
            raise LeftOutError("empty")
        line = lacking(self.row, self.want)
        raise LeftOutError(line if self.columns is not None else line.partition("; add ")[0])

    def content(self, name: str) -> Content:
        """The text or the conversation in a column."""
        value = self.row.get(name)
        if not self.first(name) or not (isinstance(value, (list, Mapping)) or name in CHATS):
            return self.text(name)
        self.used.update((name, "tools"))
        if name in CHATS[1:]:
            self.note(f"{name} {'are' if name.endswith('s') else 'is'} messages")
        chat = Conversation.read(self.origin, value, without_none(self.row.get("tools")))
        if any(message.get("weight") not in (None, 0, 1) for message in chat.messages):
            self.note("weights of messages other than 0 count as 1")
        return chat

    def text(self, name: str) -> str:
        """The text in a column."""
        self.used.add(name)
        value = self.row.get(name)
        if value is None or value == []:
            raise LeftOutError("empty")
        if not isinstance(value, str) or not is_unicode(value):
            raise LeftOutError(f"{kind_of(value)} as {name}")
        return value

    def question(self, name: str) -> Content:
        """The prompt in a column, with what stands beside a question."""
        text = self.content(name)
        if name not in ANSWERED or not isinstance(text, str):
            return text
        return JOINT.join([text, *(self.text(other) for other in BESIDE if self.row.get(other)), ""])

    def answered(self, asked: str, *others: str) -> list[Any]:
        """A prompt and its answer, if the form has one."""
        question, answers = self.question(asked), [*map(self.content, others)]
        contents: list[Any] = alike(question, answers, self.origin, self.note)
        if asked in ANSWERED:
            *names, last = [asked, *(name for name in BESIDE if name in self.used), *others]
            what = "prompt and completion" if others else "the prompt"
            self.note(f"{', '.join(names)} and {last} are {what}" if names else f"{last} is {what}")
        return without_repeats(contents[0], contents[1:], self.note)

    def pair(self) -> list[Any]:
        """The prompt, empty without one, the chosen and the rejected answer."""
        prompt, answers = None, [self.content(name) for name in PAIR]
        asked, talk = self.first(*ASKED), self.first(*CHATS)
        whole = all(isinstance(chat, Conversation) and len(chat.messages) > 1 for chat in answers)
        self.used.add(PROMPT)  # a text beside whole conversations is a part of them
        if asked and not (whole and (asked != PROMPT or isinstance(self.row[PROMPT], str))):
            prompt = self.question(asked)
            if asked != PROMPT:
                self.note(f"{asked} is the prompt")
        elif talk and not whole:
            chat: Any = self.content(talk)
            prompt = chat.before_answer()
        contents: list[Any] = alike(prompt, answers, self.origin, self.note)
        if isinstance(contents[1], Conversation):
            return split_chats(*contents)
        if prompt is None:
            _, chosen, rejected = contents
            return split_texts(chosen, rejected, self.note, self.want == "preferences")
        return without_repeats(contents[0], contents[1:], self.note)

    def with_system(self, content: Content, form: Form) -> tuple[Content, str | None]:
        """A conversation after the row's system message, or a text and that message."""
        name = next((name for name in SYSTEMS if name in self.row), None)
        if name is None or form == PLAIN or not content:
            return content, None
        text = self.text(name) if self.row[name] else ""
        if isinstance(content, str):
            return content, text
        if text and content.with_system(text) is content and content.messages[0]["content"] != text:
            self.note(f"the column {name} is not read where a conversation has a system message")
        return content.with_system(text or None), None

    def check_trained(self, form: Form) -> None:
        """Leave out a row that is marked as not to be trained on."""
        self.used.update(MARKS)
        is_desirable = self.row.get(LABEL) if len(form) > 1 else None  # of a completion, as in TRL's KTO
        if isinstance(is_desirable, bool):
            self.used.add(LABEL)
        if is_left_alone(self.row) or is_desirable is False:
            raise LeftOutError("marked as not to be trained on")

    def plain(self) -> str:
        """A whole text."""
        text = self.text(TEXT)
        if (clean := clean_text(text)) != text:
            self.note("<br /> tags, misread characters, or spaces at the ends of text are repaired")
        return clean

    def label(self) -> int | None:
        """The label of a text."""
        self.used.add(LABEL)
        label = self.row.get(LABEL)
        if isinstance(label, str):  # a table in text has texts alone
            label = TEXT_LABELS.get(label.lower(), label)
        if not isinstance(label, (int, float, type(None))) or label not in LABELS:
            raise LeftOutError(f"the label {shown(label)}; allowed: 1, 0, and -1 for unknown")
        return LABELS[label]
