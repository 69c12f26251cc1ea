"""Token ids of a prompt and its answer, and the special tokens of a tokenizer.

Both are encoded together; a token that the boundary falls into belongs to the answer. Decoding the ids gives
back the text, for every tokenizer.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.chat import ASSISTANT, SYSTEM, USER, Conversation, LeftOutError
from lit_klrb.data.turns import Span
from lit_klrb.errors import ConfigurationError

T = TypeVar("T")


def not_empty(content: T) -> T:
    """A text or token ids; if there are none, the row is left out."""
    if not content:
        raise LeftOutError("empty")
    return content


class Encoded(NamedTuple):
    """Token ids of a text, and which of them belong to an answer."""

    ids: list[int]
    mask: list[bool]

    @property
    def start(self) -> int:
        """Where the answer begins."""
        return self.mask.index(True) if any(self.mask) else len(self.ids)


def encode(
    prompt: str,
    answer: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    special_tokens: bool = True,
    spans: Sequence[Span] = (),
) -> Encoded:
    """Token ids of a prompt and its answer, after those that the tokenizer puts before a text, such as a BOS.

    What it puts after a text, such as an EOS, is left out. A text that begins with the former gets no second
    one. A text with nothing before it is an answer as a whole.

    Args:
        prompt: What is given.
        answer: What is trained on or compared, which follows it immediately; None for a prompt alone.
        tokenizer: A language model's.
        special_tokens: False for what a chat template made, which has its special tokens.
        spans: The characters that belong to answers, in place of those of `answer`.

    Example:
        >>> from lit_klrb.data.tokenizer import train_bpe
        >>> tokenizer = train_bpe(["2+2=4"], vocab_size=258)
        >>> ids, mask = encode("2+2=", "4", tokenizer)
        >>> tokenizer.decode(ids), mask
        ('2+2=4', [False, False, False, False, True])
        >>> encode("", "2+2", tokenizer).mask, encode("2+2", None, tokenizer).mask
        ([True, True, True], [False, False, False])
    """
    text = prompt + (answer or "")
    spans = spans or ([(len(prompt), len(text))] if answer else [])
    ids, offsets = _tokens(text, tokenizer, needs_offsets=bool(prompt and spans))
    if offsets is None:
        mask = [bool(spans)] * len(ids)
    else:
        mask = [any(end > first and start < last for first, last in spans) for start, end in offsets]
    before = beginning(tokenizer) if special_tokens else []
    if ids[: len(before)] != before:
        ids, mask = [*before, *ids], [*([False] * len(before)), *mask]
    return Encoded(ids, mask)


def _tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, needs_offsets: bool
) -> tuple[list[int], Iterable[Span] | None]:
    """Token ids, and the characters of each if they are needed."""
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        encoded = backend.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets if needs_offsets else None
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # What is decoded of the beginnings tells where each token ends
    ends = (len(str(tokenizer.decode(ids[:count]))) for count in range(len(ids) + 1))
    return ids, pairwise(ends) if needs_offsets else None


def classifier_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, special_tokens: bool = True, max_tokens: int | None = None
) -> list[int]:
    """Token ids of a text for a classifier, with what its tokenizer puts before and after a text, once.

    Longer texts are truncated to `max_tokens`; what a chat template made has its special tokens.
    """
    before = beginning(tokenizer) if special_tokens else []
    start = str(tokenizer.decode(before)) if before else ""
    text = text.removeprefix(start)  # one BOS, whoever adds it
    cut = {"truncation": True, "max_length": max_tokens} if max_tokens is not None else {}
    return list(tokenizer(text, add_special_tokens=special_tokens, **cut)["input_ids"])


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of the special tokens that a tokenizer puts before a text; most have none, or a BOS."""
    backend = getattr(tokenizer, "_tokenizer", None)
    return list(_beginning(tokenizer, str(backend and backend.post_processor)))


@lru_cache(maxsize=64)
def _beginning(tokenizer: PreTrainedTokenizerBase, post_processor: str) -> tuple[int, ...]:
    (text,) = tokenizer(["a"], add_special_tokens=False)["input_ids"]
    (whole,) = tokenizer(["a"])["input_ids"]
    starts = range(len(whole) - len(text) + 1)
    return tuple(whole[: next((n for n in starts if whole[n : n + len(text)] == text), 0)])


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The ids of the tokens that end a completion, the tokenizer's EOS first.

    The others are those of the model's generation settings: chat models have one for the end of a turn and
    one for the end of a text.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(ends if isinstance(ends, (list, tuple)) else [ends])]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def control_tokens(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> tuple[str, ...]:
    """The special tokens that end completions, have a role such as PAD, or are written by the chat template.

    Others, such as a `<think>` that was added to the vocabulary, are the user's own: they may be in messages,
    and rewards read them.
    """
    known = str(tokenizer.chat_template)
    for roles in ((USER,), (USER, ASSISTANT), (USER, ASSISTANT, USER), (SYSTEM, USER, ASSISTANT)):
        chat = Conversation(tuple({"role": role, "content": "a"} for role in roles), "")
        for asks in (False, True):
            with suppress(LeftOutError, ConfigurationError):
                known += chat.rendered("", tokenizer, add_generation_prompt=asks)
    named = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    named |= {str(tokenizer.convert_ids_to_tokens(index)) for index in ends}
    return tuple(token for token in _special(tokenizer) if token in named or token in known)


def _special(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [*dict.fromkeys([*added, *tokenizer.all_special_tokens])]


def decoded(
    sequences: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, controls: Sequence[str]
) -> list[str]:
    """Token ids as texts without control tokens; special tokens of the user's own stay."""
    hidden = {tokenizer.convert_tokens_to_ids(token) for token in controls}
    skip = {*_special(tokenizer)} <= {*controls}
    shown = [ids if skip else [index for index in ids if index not in hidden] for ids in sequences]
    return list(tokenizer.batch_decode(shown, skip_special_tokens=skip))
