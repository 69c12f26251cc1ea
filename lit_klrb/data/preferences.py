"""Preferences: pairs of a chosen and a rejected completion of the same prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import ASSISTANT, USER, Conversation, Message, is_unicode, shown
from lit_klrb.data.corpora import open_splits
from lit_klrb.data.encoding import encode, ended
from lit_klrb.errors import ConfigurationError


class Preference(NamedTuple):
    """A prompt and two completions, as text."""

    prompt: str
    chosen: str
    rejected: str


class ChatPreference(NamedTuple):
    """Two conversations that differ in their last message only, the assistant's answer."""

    chosen: Conversation
    rejected: Conversation


def load_preferences(source: str) -> list[Preference | ChatPreference]:
    """Load the preferences of a data set's train split.

    As in TRL, conversations have their common beginning in the column prompt, or in both chosen and rejected;
    in the latter case a text in the column prompt is ignored.

    Args:
        source: A hub id, a folder, or a .parquet or .jsonl file with the columns prompt, chosen and rejected.

    Raises:
        ConfigurationError: If it cannot be read, has no rows, or a column is missing or is neither of texts
            nor of conversations.
    """
    rows = open_splits("preferences", source).get("train", ())
    if not len(rows):
        raise ConfigurationError(f"{source} has no rows in its train split", key="preferences")
    return parse_preferences("preferences", source, rows)


def parse_preferences(
    key: str, place: str, rows: Any, needs_prompt: bool = True
) -> list[Preference | ChatPreference]:
    """The preferences of a table.

    Args:
        key: The argument that names it, for the error message.
        place: Its name.
        rows: The table.
        needs_prompt: Whether texts need a prompt; without the column, it is empty.

    Raises:
        ConfigurationError: If a column is missing or is neither of texts nor of conversations.
    """
    names = rows.column_names
    chats = any(
        isinstance(value, list)
        for name in ("chosen", "rejected")
        for value in (rows[name][:] if name in names else ())
    )
    needed = Preference._fields if needs_prompt and not chats else Preference._fields[1:]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ConfigurationError(
            f"{place} has no column {missing[0]}; its columns: {', '.join(names)}", key=key
        )
    columns = [rows[name][:] if name in names else [""] * len(rows) for name in Preference._fields]
    numbered = [(f"{place} row {number}", *row) for number, row in enumerate(zip(*columns, strict=True), 1)]
    if chats:
        return [_chat_preference(key, *row) for row in numbered]
    return [_text_preference(key, needs_prompt, *row) for row in numbered]


def _text_preference(key: str, needs_prompt: bool, place: str, *texts: Any) -> Preference:
    for name, text in zip(Preference._fields, texts, strict=True):
        full = name == "prompt" and needs_prompt
        if not isinstance(text, str) or not is_unicode(text) or (full and not text):
            hint = " that is not empty" if full else ""
            raise ConfigurationError(
                f"{place} has the {name} {shown(text)}; a text{hint} is expected", key=key
            )
    return Preference(*texts)


def _chat_preference(key: str, place: str, prompt: Any, chosen: Any, rejected: Any) -> ChatPreference:
    begun = isinstance(prompt, list)
    beginning = Conversation.read(key, f"{place}, prompt,", prompt).messages if begun else ()
    first, second = (
        _answered(key, f"{place}, {name},", value, beginning)
        for name, value in (("chosen", chosen), ("rejected", rejected))
    )
    if first.messages[:-1] != second.messages[:-1]:
        raise ConfigurationError(
            f"{place} has a chosen and a rejected conversation that differ before the answer", key=key
        )
    if len(first.messages) == 1:
        raise ConfigurationError(f"{place} has no message before the assistant's", key=key)
    return ChatPreference(replace(first, place=place), replace(second, place=place))


def _answered(key: str, place: str, value: Any, beginning: tuple[Message, ...]) -> Conversation:
    """A conversation that ends with an answer; beside a prompt (`beginning`), the answer alone is given."""
    answer = Conversation.read(key, place, value)
    if answer.last_role != ASSISTANT:
        raise ConfigurationError(
            f"{place} ends with the role {answer.last_role}; the assistant's answer is expected", key=key
        )
    if beginning and len(answer.messages) > 1:
        raise ConfigurationError(
            f"{place} has {len(answer.messages)} messages; beside a prompt of messages, the assistant's "
            "answer alone is expected",
            key=key,
        )
    return replace(answer, messages=(*beginning, *answer.messages))


class PreferencePair(NamedTuple):
    """Token ids of a prompt and two completions, and the log-probability of each under the reference."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_ref_logprob: float = 0.0
    rejected_ref_logprob: float = 0.0


def as_tokens(
    key: str,
    preferences: Sequence[Preference | ChatPreference],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    system_prompt: str | None = None,
) -> list[PreferencePair]:
    """Preferences as token ids, each completion with the token that ends it; without log-probabilities.

    Args:
        key: The argument that names their source, for the error message.
        preferences: Of texts or of conversations.
        tokenizer: The policy's, whose chat template makes texts of conversations.
        ends: The tokens that can end a completion, see `end_tokens`.
        system_prompt: A system message for conversations without one; texts become conversations.

    Raises:
        ConfigurationError: If the tokenizer has no chat template, or the template refuses a conversation.
    """
    chats = system_prompt is not None or any(isinstance(pair, ChatPreference) for pair in preferences)
    texts = [
        _rendered(key, _as_chat(pair), tokenizer, system_prompt) if chats else pair for pair in preferences
    ]
    prompts, *completions = map(list, zip(*texts, strict=True))
    chosen, rejected = (
        [ended(ids, tokenizer, ends) for ids in encode(tokenizer, column, special_tokens=False)]
        for column in completions
    )
    # A template adds the special tokens itself
    encoded = encode(tokenizer, prompts, special_tokens=not chats)
    return [PreferencePair(*row) for row in zip(encoded, chosen, rejected, strict=True)]


def _as_chat(preference: Preference | ChatPreference) -> ChatPreference:
    if isinstance(preference, ChatPreference):
        return preference
    user, place = {"role": USER, "content": preference.prompt}, f"the prompt {shown(preference.prompt)}"
    chosen, rejected = (
        Conversation((user, {"role": ASSISTANT, "content": text}), place) for text in preference[1:]
    )
    return ChatPreference(chosen, rejected)


def _rendered(
    key: str, preference: ChatPreference, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> Preference:
    chosen, rejected = (chat.with_system(system_prompt) for chat in preference)
    prompt = chosen.before_answer(key).prompt(key, tokenizer)
    texts = [chat.rendered(key, tokenizer) for chat in (chosen, rejected)]
    if not all(text.startswith(prompt) for text in texts):
        raise ConfigurationError(
            f"{chosen.place}: the chat template gives the prompt another text once the answer is there; "
            f"alone it is {shown(prompt)}",
            key=key,
        )
    return Preference(prompt, *(text.removeprefix(prompt) for text in texts))


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> Batch:
    """Collate B pairs into 2B sequences: all chosen completions, then all rejected ones.

    Args:
        pairs: The pairs of the batch.
        pad_token_id: The padding token, on the left of prompts and on the right of completions.

    Returns:
        `tokens` and `attention_mask` [2B, P+T], `mask` [2B, T] and `ref_logprob` [2B].

    Example:
        >>> batch = collate_pairs([PreferencePair([5], [6, 7], [8], -1.0, -2.0)], pad_token_id=0)
        >>> batch["tokens"].tolist()
        [[5, 6, 7], [5, 8, 0]]
    """
    prompts = pad([pair.prompt for pair in pairs] * 2, pad_token_id, side="left")
    completions = pad(
        [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_token_id, side="right"
    )
    joined: dict[str, Tensor] = {key: torch.cat([prompts[key], completions[key]], 1) for key in prompts}
    ref_logprob = [pair.chosen_ref_logprob for pair in pairs] + [pair.rejected_ref_logprob for pair in pairs]
    return {**joined, "mask": completions["attention_mask"], "ref_logprob": torch.tensor(ref_logprob)}
