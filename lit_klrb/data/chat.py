"""Conversations: lists of messages, and the texts that a tokenizer's chat template makes of them."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.trial import ends_in_time
from lit_klrb.errors import ConfigurationError, refusing

# `role`, `content`, and whatever else the template reads.
Message = Mapping[str, Any]
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, "developer", USER, ASSISTANT, "tool")


# Whether a template makes a text in time, which is tried once for each.
_TRIED: dict[str, bool] = {}


@dataclass(frozen=True)
class Conversation:
    """Messages with roles, as TRL and chat templates have them.

    Args:
        messages: At least one.
        place: Where they come from, for error messages.
        settings: What the template reads beside them: `chat_template_kwargs`, and the row's tools.
    """

    messages: tuple[Message, ...]
    place: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, key: str, place: str, value: Any, tools: Any = None) -> Self:
        """Check a value of unknown origin.

        Args:
            key: The argument that names its source, for the error message.
            place: Where it comes from.
            value: A list of messages {"role": ..., "content": ...}; a content may be parts that are all text.
            tools: What the assistant may call, for the template: a list, or one as JSON.

        Raises:
            ConfigurationError: If it is not a list of messages whose content is text, or has an unknown role.
        """
        if not isinstance(value, (list, tuple)) or not value:
            raise ConfigurationError(f"{place} is {shown(value)}; a list of messages is expected", key=key)
        messages = [_as_text(message) for message in value]
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                problem = f"the message {shown(message)}; messages have role and content"
            elif message["role"] not in ROLES:
                problem = f"the role {shown(message['role'])}; allowed: {', '.join(ROLES)}"
            elif not isinstance(message["content"], str) or not is_unicode(message["content"]):
                problem = f"the content {shown(message['content'])}; allowed: strings of Unicode characters"
            else:
                continue
            raise ConfigurationError(f"{place} has {problem}", key=key)
        with refusing(f"{place} has the tools {shown(tools)}", ValueError, key=key):
            given = json.loads(tools) if isinstance(tools, str) else tools
        return cls(tuple(messages), place, {"tools": given} if given else {})

    def identity(self, part: slice = slice(None)) -> str:
        """A hash of messages, in hexadecimal digits."""
        messages = json.dumps(self.messages[part], sort_keys=True, default=str)
        return hashlib.sha256(messages.encode()).hexdigest()

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """The conversation with more settings of the template."""
        return replace(self, settings={**self.settings, **settings}) if settings else self

    @property
    def last_role(self) -> str:
        """The role of the last message."""
        role: str = self.messages[-1]["role"]
        return role

    def with_system(self, system: str | None, *, instead: bool = False) -> Self:
        """The conversation after a system message, unless `system` is None."""
        has_one = self.messages[0]["role"] in ROLES[:2]
        if system is None or (has_one and not instead):
            return self
        return replace(self, messages=({"role": SYSTEM, "content": system}, *self.messages[has_one:]))

    def with_examples(self, examples: Sequence[tuple[str, str]]) -> Self:
        """The conversation after questions with answers, which follow its system message.

        Example:
            >>> system, user = {"role": "system", "content": "Be"}, {"role": "user", "content": "2?"}
            >>> chat = Conversation((system, user), "")
            >>> [message["content"] for message in chat.with_examples([("1?", "One.")]).messages]
            ['Be', '1?', 'One.', '2?']
        """
        start = int(self.messages[0]["role"] in ROLES[:2])
        turns = [
            {"role": role, "content": text}
            for pair in examples
            for role, text in zip((USER, ASSISTANT), pair, strict=True)
        ]
        return replace(self, messages=(*self.messages[:start], *turns, *self.messages[start:]))

    def before_answer(self, key: str) -> Self:
        """The conversation without its last message if that is the assistant's.

        Raises:
            ConfigurationError: If there is nothing before it.
        """
        if self.last_role != ASSISTANT:
            return self
        if len(self.messages) == 1:
            raise ConfigurationError(f"{self.place} has no message before the assistant's", key=key)
        return replace(self, messages=self.messages[:-1])

    def prompt(self, key: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that a policy continues: up to the beginning of an answer, or a begun answer.

        As in TRL, a last message of the assistant is the beginning of the answer.

        Raises:
            ConfigurationError: If the last message is the system's, the tokenizer has no chat template, or
                the template refuses the messages.
        """
        if self.last_role in ROLES[:2]:
            raise ConfigurationError(
                f"{self.place} ends with a {self.last_role} message; a user's is expected", key=key
            )
        begun = self.last_role == ASSISTANT
        settings = {"continue_final_message": begun, "add_generation_prompt": not begun}
        return self.rendered(key, tokenizer, **settings)

    def text(self, key: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The whole conversation as text, without the end-of-sequence token if it ends with one.

        Raises:
            ConfigurationError: As `prompt`.
        """
        text, eos = self.rendered(key, tokenizer), tokenizer.eos_token
        before, _, after = text.rpartition(eos) if eos else ("", "", text)
        return text if after.strip() else before  # templates have a newline after it

    def rendered(self, key: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> str:
        """The whole text that the chat template makes.

        Raises:
            ConfigurationError: If the tokenizer has no chat template, or the template refuses the messages.
        """
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                f"{self.place} is a conversation, but the tokenizer has no chat template; start from a model "
                "whose tokenizer has one, or give texts",
                key=key,
            )

        def render() -> Any:  # in transformers' sandbox
            messages = [dict(message) for message in self.messages]
            return tokenizer.apply_chat_template(messages, tokenize=False, **self.settings, **settings)

        template = str(tokenizer.chat_template)
        if template not in _TRIED:
            _TRIED[template] = ends_in_time(render)
        if not _TRIED[template]:
            raise ConfigurationError(
                f"{self.place}: the chat template takes too much time or memory", key=key
            )
        with refusing(f"{self.place}: the chat template refuses it", key=key):
            text = render()
        if not isinstance(text, str) or not text or not is_unicode(text):
            raise ConfigurationError(f"{self.place}: the chat template makes no text of it", key=key)
        return text


def _as_text(message: Any) -> Any:
    """A message whose content is a text: the parts of one that are all text, or nothing beside calls."""
    if not isinstance(message, Mapping):
        return message
    # Tables have None where a message lacks an entry of the others
    kept = {name: without_none(entry) for name, entry in message.items() if entry is not None}
    content = kept.get("content", "" if "tool_calls" in kept else None)
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    return kept if content is None else {**kept, "content": content}


def _is_text(part: Any) -> bool:
    is_part = isinstance(part, Mapping) and part.get("type", "text") == "text"
    return is_part and isinstance(part.get("text"), str)


def without_none(value: Any) -> Any:
    """A value of nested mappings and lists without the entries that are None."""
    if isinstance(value, Mapping):
        return {name: without_none(entry) for name, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, such as a prompt of a conversation, rather than a text."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def as_messages(
    prompts: Sequence[Sequence[Message]], completions: Sequence[str]
) -> dict[str, list[list[Message]]]:
    """Prompts and completions as lists of messages, which is what rewards of conversations read in TRL.

    A prompt's last message belongs to the completion if it is the assistant's.

    Example:
        >>> as_messages([[{"role": "user", "content": "2+2?"}]], ["4"])["completions"]
        [[{'role': 'assistant', 'content': '4'}]]
    """
    begun = [prompt[-1]["role"] == ASSISTANT for prompt in prompts]
    starts = [prompt[-1]["content"] if answer else "" for prompt, answer in zip(prompts, begun, strict=True)]
    return {
        "prompts": [list(prompt[:-1] if a else prompt) for prompt, a in zip(prompts, begun, strict=True)],
        "completions": [
            [{"role": ASSISTANT, "content": start + text}]
            for start, text in zip(starts, completions, strict=True)
        ],
    }


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can contain but tokenizers cannot encode."""
    return re.search("[\ud800-\udfff]", text) is None


def shown(value: Any) -> str:
    """A value in about 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
