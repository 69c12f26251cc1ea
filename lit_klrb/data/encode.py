"""The one way from a row to token ids, so that training, evaluation and comparison read the same tokens.

A prompt and its answer are encoded together; a token that the boundary falls into belongs to the answer. What
comes of it decodes to the text of the row, for every tokenizer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.chat import (
    ASSISTANT,
    SYSTEM,
    USER,
    Conversation,
    LeftOutError,
    check_settings,
    is_empty,
    is_left_alone,
    shown,
    strings,
)
from lit_klrb.data.kinds import Content
from lit_klrb.data.turns import NO_PROMPT, Span, Turns
from lit_klrb.errors import ConfigurationError, refusing

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
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(own if isinstance(own, (list, tuple)) else [own])]
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
    rows: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, controls: Sequence[str]
) -> list[str]:
    """Rows of token ids as texts without control tokens; special tokens of the user's own stay."""
    hidden = {tokenizer.convert_tokens_to_ids(token) for token in controls}
    skip = {*_special(tokenizer)} <= {*controls}
    shown = [row if skip else [index for index in row if index not in hidden] for row in rows]
    return list(tokenizer.batch_decode(shown, skip_special_tokens=skip))


class Reader:
    """Reads prompts and answers, texts or conversations, as a language model with a tokenizer does.

    Args:
        key: The argument that names their source, for error messages.
        tokenizer: The model's.
        ends: The tokens that can end a completion, see `end_tokens`.
        system_prompt: A system message for conversations without one, which texts then become.
        template: Further settings of the chat template.
        say: Called with what the template does unasked, once for each.
    """

    def __init__(
        self,
        key: str,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        system_prompt: str | None = None,
        template: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.key, self.tokenizer, self.ends, self.system = key, tokenizer, ends, system_prompt
        self.template, self._say, self._said = template or {}, say, set[str]()
        self.controls = control_tokens(tokenizer, ends)
        self.refuse_controls("system_prompt", system_prompt or "")
        if system_prompt is not None and tokenizer.chat_template is not None:
            probe = Conversation(({"role": USER, "content": "a"},), "").with_system(system_prompt)
            with refusing("system messages are not possible", LeftOutError, key="system_prompt"):
                probe.rendered(key, tokenizer)
        check_settings(tokenizer, self.template, "chat_template_kwargs")

    def say(self, does: str) -> None:
        """Say what the chat template does, unless it was said before."""
        if does not in self._said:
            self._said.add(does)
            self._say(f"the chat template {does}")

    def refuse_controls(self, key: str, *texts: str) -> None:
        """Refuse a setting whose texts contain control tokens."""
        if control := next(filter(None, map(self._control, texts)), None):
            raise ConfigurationError(f"contains the control token {control}", key=key)

    def _control(self, text: str) -> str | None:
        return next((control for control in self.controls if control in text), None)

    def are_texts(self, *contents: Content, system: str | None) -> bool:
        """Whether contents are read as texts, as no system message makes messages of them.

        Args:
            contents: What is read.
            system: The system message of their row.
        """
        if not all(isinstance(content, str) for content in contents) or self.system is not None:
            return False
        if system and self.tokenizer.chat_template is None:
            self.say("is missing: the columns of system messages are not read")
        return system is None or self.tokenizer.chat_template is None

    def chat(self, content: Content, role: str, system: str | None = None) -> Conversation:
        """Content without control tokens as a conversation, with system message and template's settings."""
        if isinstance(content, str):
            content = Conversation.of(content, role, shown(content))
        # Templates also write calls, thoughts and tools
        for what, values in (("a message contains", content.messages), ("tools contain", content.settings)):
            if control := next(filter(None, map(self._control, strings(values))), None):
                raise LeftOutError(f"{what} the control token {control}")
        chat = content if role == ASSISTANT else content.with_system(system or self.system)
        return replace(chat, settings={**chat.settings, **self.template})

    def prompt(self, content: Content, system: str | None = None) -> list[int]:
        """A prompt alone: up to the beginning of an answer, or a begun one."""
        if isinstance(content, str) and self.are_texts(content, system=system):
            return encode(content, None, self.tokenizer).ids
        chat = self.chat(content, USER, system)
        text = chat.prompt(self.key, self.tokenizer)
        is_asked = NO_PROMPT not in self._said and chat.messages[-1]["role"] != ASSISTANT
        if is_asked and text == chat.prompt(self.key, self.tokenizer, add_generation_prompt=False):
            self.say(NO_PROMPT)
        return encode(text, None, self.tokenizer, special_tokens=False).ids

    def answered(self, prompt: Content, answer: Content, system: str | None = None) -> Encoded:
        """A prompt with its answer, which has one end of a completion.

        Of an answer of several messages, those of the assistant are trained on.
        """
        not_empty(answer)
        if not self.are_texts(prompt, answer, system=system):
            return self._rendered(*self._joined(prompt, answer, system))
        encoded = encode(str(prompt), str(answer), self.tokenizer)
        start, ids = encoded.start, encoded.ids
        ends = [place for place in range(start, len(ids)) if ids[place] in self.ends]
        if ends and self._is_text(ids[ends[0] + 1 :]):
            raise LeftOutError("an end within the answer")
        ids = ids[: ends[0] + 1] if ends else [*ids, self.tokenizer.eos_token_id]
        return Encoded(ids, [place >= start for place in range(len(ids))])

    def classified(
        self, prompt: Content, answer: Content, system: str | None = None, max_tokens: int | None = None
    ) -> Encoded:
        """A prompt with its answer as a classifier reads both, of a conversation without the end."""
        not_empty(answer)
        are_texts = isinstance(prompt, str) and isinstance(answer, str)
        if isinstance(prompt, str) and isinstance(answer, str):
            text = self._plain(prompt + answer, "pairs")
            are_texts = not prompt or self.are_texts(prompt, answer, system=system)
        if not are_texts:
            text = self._joined(prompt, answer, system)[0].text(self.key, self.tokenizer)
        ids = classifier_ids(text, self.tokenizer, special_tokens=are_texts, max_tokens=max_tokens)
        return Encoded(ids, [True] * len(ids))

    def whole(self, content: Content, answers_only: bool = True) -> Encoded:
        """A whole text, or a conversation with its answers, or all of it as one answer."""
        is_text = isinstance(content, str)
        if isinstance(content, str):
            text = self._plain(not_empty(content), "rows")
        else:
            chat = self.chat(content, USER)
            numbers = self._answers(chat)
            if answers_only:
                return self._rendered(chat, numbers)
            text = chat.rendered(self.key, self.tokenizer)
        ids = encode("", text, self.tokenizer, special_tokens=is_text).ids
        last = max((place for place, index in enumerate(ids) if index in self.ends), default=None)
        if last is None or self._is_text(ids[last + 1 :]):
            ids = [*ids, self.tokenizer.eos_token_id]
        else:
            ids = ids[: last + 1]  # templates have a newline after it
        return Encoded(ids, [True] * len(ids))

    def _plain(self, text: str, what: str) -> str:
        """A text, before which no system message can be."""
        if self.system is not None:
            raise ConfigurationError(f"needs conversations, but the {what} are texts", key="system_prompt")
        return text

    def _joined(self, prompt: Content, answer: Content, system: str | None) -> tuple[Conversation, list[int]]:
        """A prompt with its answer as a conversation, and the numbers of the answer's messages."""
        before = self.chat(prompt, USER, system)
        messages = (*before.messages, *self.chat(answer, ASSISTANT).messages)
        chat = replace(before, messages=messages)
        return chat, self._answers(chat, len(before.messages))

    def _answers(self, chat: Conversation, first: int = 0) -> list[int]:
        """The numbers of the assistant's messages from one on that are trained on.

        If one says nothing, the row is left out.
        """
        roles = [message["role"] for message in chat.messages]
        numbers = [n for n, role in enumerate(roles) if n >= first and role == ASSISTANT]
        if any(is_empty(chat.messages[number]) for number in numbers):
            raise LeftOutError("empty")
        return [number for number in numbers if not is_left_alone(chat.messages[number])]

    def _is_text(self, ids: Sequence[int]) -> bool:
        return bool(str(self.tokenizer.decode(list(ids))).strip())

    def _rendered(self, chat: Conversation, answers: Sequence[int]) -> Encoded:
        """A conversation up to its last answer; answers are the messages of these numbers."""
        ends = [str(self.tokenizer.convert_ids_to_tokens(index)) for index in self.ends]
        turns = Turns(chat, self.key, self.tokenizer, ends, self.controls, self.say)
        spans = turns.spans(answers)
        if not spans:
            raise LeftOutError("no answer")
        text = turns.text[: spans[-1][1]]
        ids, mask = encode(text, "", self.tokenizer, special_tokens=False, spans=spans)
        if text.endswith(tuple(ends)):
            return Encoded(ids, mask)
        return Encoded([*ids, self.tokenizer.eos_token_id], [*mask, True])
