"""Names of columns, from which follows what a row is; and the setting that gives columns such names."""

from collections.abc import Mapping
from typing import Any, Literal

from lit_klrb.data.chat import SYSTEM, USER
from lit_klrb.data.rows import RawRow

# What a stage reads of a row: texts to model, prompts, preferences, pairs (preferences that need a prompt),
# or texts with labels.
Want = Literal["texts", "prompts", "preferences", "pairs", "labels"]
Form = tuple[str, ...]
# The columns that are read under other names; None for those that are not read.
Columns = Mapping[str, str | None]

TEXT, PROMPT, MESSAGES, COMPLETION = "text", "prompt", "messages", "completion"
CHOSEN, REJECTED, LABEL = "chosen", "rejected", "label"
# The column with what the teacher, or the reference, reads instead of the prompt.
TEACHER_PROMPT = "teacher_prompt"
# Names of conversations, and of a system message before what other columns have
CHATS, SYSTEMS = (MESSAGES, "conversations", "conversation"), (SYSTEM, "system_prompt")
# Names of a question with its answer, and of what a question is about
ANSWERED, BESIDE = {"question": "answer", "instruction": "output"}, ("input", "context")
# Names of the prompt of chosen and rejected
ASKED = (PROMPT, *ANSWERED, "input", "query", "problem")
# Each stage reads the first of its forms, which are names of columns, that has values.
TALKS, PAIR, PLAIN = tuple((name,) for name in CHATS), (CHOSEN, REJECTED), (TEXT,)
CONVERTIBLE = tuple((asked, answer) for asked in ANSWERED for answer in (ANSWERED[asked], COMPLETION))
FORMS: dict[Want, tuple[Form, ...]] = {
    "texts": (*TALKS, (PROMPT, COMPLETION), *CONVERTIBLE, PLAIN),
    "prompts": (*TALKS, PAIR, (PROMPT,), *CONVERTIBLE, PLAIN, *((asked,) for asked in ANSWERED)),
    "preferences": (PAIR,),
    "pairs": (PAIR,),
    "labels": (PLAIN,),
}
# How a refusal names them, and the columns that it offers
WANTED: dict[Want, tuple[str, Form]] = {
    "texts": ("text, messages, or prompt and completion", (PROMPT, COMPLETION)),
    "prompts": ("prompt, messages or text", (PROMPT,)),
    "preferences": ("chosen and rejected", PAIR),
    "pairs": ("chosen and rejected", PAIR),
    "labels": (TEXT, (TEXT, LABEL)),
}
# Columns that change what a prompt means, and that nothing reads; others of a prompt's row reach rewards
UNHEARD = (*BESIDE, "tools", "history", "documents", "image", "images", "audio", "video", "videos")
# Other names, which a refusal offers to read
LIKE = {
    MESSAGES: ("data", "chat", "dialogue", "dialog", "turns", CHOSEN),
    PROMPT: ("problem", "query", "question", "instruction", "input", "task", USER),
    COMPLETION: ("solution", "response", "answer", "output", "answers", "target", "assistant", CHOSEN),
    TEXT: ("chat", "dialogue", "content", "sentence", "review", "document", "body", "article"),
    CHOSEN: ("chosen_response", "response_chosen", "preferred", "accepted", "winner"),
    LABEL: ("labels", "sentiment", "class", "target"),
    REJECTED: ("rejected_response", "response_rejected", "dispreferred", "loser"),
}


def renamed(row: RawRow, columns: Columns) -> RawRow:
    """A row with columns under other names.

    Example:
        >>> renamed({"info": {"posts": ["a"]}, "system": "b"}, {"prompt": "info.posts.0", "system": None})
        {'info': {'posts': ['a']}, 'prompt': 'a'}
    """
    kept = {name: value for name, value in row.items() if columns.get(name, "") is not None}
    return kept | {name: value for name, path in columns.items() if (value := _at(row, path)) is not None}


def _at(value: Any, path: str | None) -> Any:
    """What a column has, or a part of it, such as `answers.text.0`; None without it."""
    if path is None or path in value:
        return value[path] if path else None
    for part in path.split("."):
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        value = inside.get(int(part) if part.isdigit() else part) if isinstance(inside, Mapping) else None
    return value


def lacking(row: RawRow, want: Want) -> str:
    """What a row lacks, and the setting by which it could be read.

    Example:
        >>> lacking({"problem": "2+2?", "solution": "4"}, "texts").partition("; ")[2]
        "its columns: problem, solution; add --data.columns '{prompt: problem, completion: solution}'"
    """
    wanted, targets = WANTED[want]
    targets = tuple(target for target in targets if target not in row)
    if want in ("texts", "prompts"):
        lists = {name: isinstance(row[name], list) for name in LIKE[MESSAGES] if name in row}
        targets = (COMPLETION,) if row.keys() & {*ANSWERED} else targets
        if any(lists.values()):
            targets = (MESSAGES,)
        elif lists.keys() - {CHOSEN} or not any(_like(row, target) for target in targets):
            targets = PLAIN
    added = ", ".join(f"{target}: {_like(row, target) or 'COLUMN'}" for target in targets)
    others = ", or write both if another column has the choice" if wanted == WANTED["pairs"][0] else ""
    columns = ", ".join(row) or "none"
    return f"no column {wanted}; its columns: {columns}; add --data.columns '{{{added}}}'{others}"


def _like(row: RawRow, target: str) -> str | None:
    """The column that may be meant, also by its own name in other letters."""
    columns = {column.lower(): column for column in row if column}
    return next((columns[name] for name in (target, *LIKE[target]) if name in columns), None)
