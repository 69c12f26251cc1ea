"""Prompts and texts from files, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.chat import Conversation, is_unicode, shown
from lit_klrb.data.encode import encode
from lit_klrb.data.kinds import TEACHER_PROMPT, Row
from lit_klrb.data.prompts import Prompt, read_prompts
from lit_klrb.data.rows import read_files, suffix_of
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path


def read_table(key: str, source: str, column: str, limit: int = 0) -> dict[str, list[Any]]:
    """The columns of a file of prompts or texts."""
    path = local_path(source, key)
    if not path.exists():
        raise ConfigurationError(f"{source} does not exist", key=key)
    rows = read_files(key, [path])
    if suffix_of(path) == ".txt":
        rows = [{column: row["text"]} for row in rows if str(row["text"]).strip()]
    names = dict.fromkeys(name for row in rows for name in row)
    if not rows:
        raise ConfigurationError(f"{source} has no rows", key=key)
    if column not in names:
        raise ConfigurationError(f"{source} has no column {column}; its columns: {', '.join(names)}", key=key)
    return {name: [row.get(name) for row in rows[: limit or None]] for name in names}


def encode_prompts(
    key: str,
    prompts: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    system: str | None = None,
    teachers: Sequence[Any] = (),
    teacher_system: str | None = None,
) -> list[Prompt]:
    """Prompts as they are, without cutting, and what the reference reads in their place.

    Each is a text, or a conversation that becomes one by the tokenizer's chat template; so is what the
    reference reads, with system prompts as in `PromptReader`. No `teachers` for the same.
    """
    others = teachers or [None] * len(prompts)
    rows = [
        _as_row(key, number, prompt, {TEACHER_PROMPT: other})
        for number, (prompt, other) in enumerate(zip(prompts, others, strict=True), 1)
    ]
    return read_prompts(rows, tokenizer, 1, 1, system, teacher_system, key=key)


def _as_row(key: str, number: int, prompt: Any, columns: Mapping[str, Any]) -> Row:
    place = f"prompt {number}"
    if isinstance(prompt, str):
        _check_encodable(key, place, prompt)
        return Row(prompt, columns=columns, place=place)
    return Row(Conversation.read(key, place, prompt), columns=columns, place=place)


def _check_encodable(key: str, name: str, text: str) -> None:
    if not is_unicode(text):
        raise ConfigurationError(f"{name} is not text: it has a lone surrogate", key=key)


def encode_windows(
    key: str, texts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Token ids of texts, cut into consecutive windows.

    The first token of each window only serves as context, so each window starts with the last token of the
    one before.

    Returns:
        The windows, and the number of the text of each; texts of fewer than two tokens are skipped, and the
        others numbered from 0.
    """
    windows, numbers, count = [], [], 0
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ConfigurationError(f"text {number} is {shown(text)}; a text is expected", key=key)
        _check_encodable(key, f"text {number}", text)
        ids = encode(text, None, tokenizer).ids
        starts = range(0, len(ids) - 1, max_tokens - 1)
        windows += [ids[start : start + max_tokens] for start in starts]
        numbers += [count] * len(starts)
        count += bool(starts)
    if not windows:
        raise ConfigurationError("all texts have fewer than two tokens", key=key)
    return windows, numbers
