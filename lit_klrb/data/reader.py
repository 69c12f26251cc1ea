"""The one way from a row to token ids, so that training, evaluation and comparison read the same tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.chat import (
    ASSISTANT,
    USER,
    Content,
    Conversation,
    LeftOutError,
    check_settings,
    is_empty,
    is_left_alone,
    shown,
    strings,
)
from lit_klrb.data.encode import Encoded, classifier_ids, control_tokens, encode, not_empty
from lit_klrb.data.turns import NO_PROMPT, Turns
from lit_klrb.errors import ConfigurationError, refusing


@dataclass(eq=False)
class Reader:
    """Reads prompts and answers, texts or conversations, as a language model with a tokenizer does."""

    key: str  # the argument that names their source, for error messages
    tokenizer: PreTrainedTokenizerBase
    ends: Sequence[int]  # the tokens that can end a completion, see `end_tokens`
    system_prompt: str | None = None  # a system message for conversations without one, as texts then become
    template: Mapping[str, Any] = field(default_factory=dict)  # further settings of the chat template
    say: Callable[[str], None] = lambda line: None  # called once with each thing the template does unasked

    def __post_init__(self) -> None:
        self._said = set[str]()
        self.controls = control_tokens(self.tokenizer, self.ends)
        self.refuse_controls("system_prompt", self.system_prompt or "")
        if self.system_prompt is not None and self.tokenizer.chat_template is not None:
            probe = Conversation.of("a", USER, "").with_system(self.system_prompt)
            with refusing("system messages are not possible", LeftOutError, key="system_prompt"):
                probe.rendered(self.key, self.tokenizer)
        check_settings(self.tokenizer, self.template, "chat_template_kwargs")

    def say_of_template(self, does: str) -> None:
        """Say what the chat template does, unless it was said before."""
        if does not in self._said:
            self._said.add(does)
            self.say(f"the chat template {does}")

    def refuse_controls(self, key: str, *texts: str) -> None:
        """Refuse a setting whose texts contain control tokens."""
        if control := next(filter(None, map(self._control, texts)), None):
            raise ConfigurationError(f"contains the control token {control}", key=key)

    def _control(self, text: str) -> str | None:
        return next((control for control in self.controls if control in text), None)

    def are_texts(self, *contents: Content, system: str | None) -> bool:
        """Whether contents are read as texts: neither theirs nor the setting is a system message."""
        if not all(isinstance(content, str) for content in contents) or self.system_prompt is not None:
            return False
        if system and self.tokenizer.chat_template is None:
            self.say_of_template("is missing: the columns of system messages are not read")
        return system is None or self.tokenizer.chat_template is None

    def chat(self, content: Content, role: str, system: str | None = None) -> Conversation:
        """Content without control tokens as a conversation, with system message and template's settings."""
        if isinstance(content, str):
            content = Conversation.of(content, role, shown(content))
        # Templates also write calls, thoughts and tools
        for what, values in (("a message contains", content.messages), ("tools contain", content.settings)):
            if control := next(filter(None, map(self._control, strings(values))), None):
                raise LeftOutError(f"{what} the control token {control}")
        chat = content if role == ASSISTANT else content.with_system(system or self.system_prompt)
        return replace(chat, settings={**chat.settings, **self.template})

    def prompt(self, content: Content, system: str | None = None) -> list[int]:
        """A prompt alone: up to the beginning of an answer, or a begun one."""
        if isinstance(content, str) and self.are_texts(content, system=system):
            return encode(content, None, self.tokenizer).ids
        chat = self.chat(content, USER, system)
        text = chat.prompt(self.key, self.tokenizer)
        is_asked = NO_PROMPT not in self._said and chat.messages[-1]["role"] != ASSISTANT
        if is_asked and text == chat.prompt(self.key, self.tokenizer, add_generation_prompt=False):
            self.say_of_template(NO_PROMPT)
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
        ends = [index for index in range(start, len(ids)) if ids[index] in self.ends]
        if ends and self._is_text(ids[ends[0] + 1 :]):
            raise LeftOutError("an end within the answer")
        ids = ids[: ends[0] + 1] if ends else [*ids, self.tokenizer.eos_token_id]
        return Encoded(ids, [index >= start for index in range(len(ids))])

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
        length = max((n for n, index in enumerate(ids, 1) if index in self.ends), default=0)
        is_ended = length and not self._is_text(ids[length:])  # templates have a newline after it
        ids = ids[:length] if is_ended else [*ids, self.tokenizer.eos_token_id]
        return Encoded(ids, [True] * len(ids))

    def _plain(self, text: str, what: str) -> str:
        """A text, before which no system message can be."""
        if self.system_prompt is not None:
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
        turns = Turns(chat, self.key, self.tokenizer, ends, self.controls, self.say_of_template)
        spans = turns.spans(answers)
        if not spans:
            raise LeftOutError("no answer")
        text = turns.text[: spans[-1][1]]
        ids, mask = encode(text, "", self.tokenizer, special_tokens=False, spans=spans)
        if text.endswith(tuple(ends)):
            return Encoded(ids, mask)
        return Encoded([*ids, self.tokenizer.eos_token_id], [*mask, True])
