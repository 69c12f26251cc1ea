"""Conversations: lists of messages, and the texts that a tokenizer's chat template makes of them."""

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from typing import Any, Self

import jinja2
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError, brief, is_exhausted

# `role`, `content`, and whatever else the template reads.
Message = Mapping[str, Any]
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
TURNS = USER, ASSISTANT
# What stands between a question, what it is about, and its answer, if they are texts
JOINT = "\n\n"
ROLES = (SYSTEM, "developer", USER, ASSISTANT, "tool")
# Other names of these roles, in any case of letters
SPEAKERS = {
    **{name: name for name in ROLES},
    "human": USER,
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call", "tool_call"), ASSISTANT),
    **dict.fromkeys(("function", "observation", "ipython", "function_response", "tool_response"), "tool"),
}
# Messages, or one, that a table in text has as JSON, or as Python prints them
LISTED = re.compile(r"""\s*(\[\s*\{\s*['"](role|content|from|value)|\{\s*['"]role)['"]\s*:""")
# What marks an answer, or a row, as not to be trained on, by the entry that says so
MARKS = dict.fromkeys(("weight", "train", "trainable", "training", "loss", "loss_mask"), False)
MARKS["masked"] = True
# What templates call.
_FUNCTIONS = {*jinja2.defaults.DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}


class LeftOutError(ValueError):
    """A row that cannot be read as a whole; the message is the reason, which is counted."""


@dataclass(frozen=True)
class Conversation:
    """Messages with roles, as TRL and chat templates have them."""

    messages: tuple[Message, ...]  # at least one
    origin: str  # where they come from, for error messages
    # What the template reads beside them: `chat_template_kwargs`, and the row's tools
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, origin: str, value: Any, tools: Any = None) -> Self:
        """A conversation of a value as in `messages_of`, with the tools of its row, which may be JSON."""
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
        except ValueError:
            raise LeftOutError("the tools are not JSON") from None
        return cls(tuple(messages_of(value)), origin, {"tools": tools} if tools else {})

    @classmethod
    def of(cls, text: str, role: str, origin: str) -> Self:
        """A text as a message."""
        return cls(({"role": role, "content": text.removesuffix(JOINT)},), origin)

    def before_answer(self) -> Self:
        """The conversation without the last answer."""
        *earlier, last = self.messages
        if last["role"] == ASSISTANT and not earlier:
            raise LeftOutError("no message before the assistant's")
        return replace(self, messages=tuple(earlier)) if last["role"] == ASSISTANT else self

    def identity(self) -> str:
        """A hash of the messages, in hexadecimal digits."""
        messages = json.dumps(self.messages, sort_keys=True, default=str)
        return hashlib.sha256(messages.encode()).hexdigest()

    def with_system(self, system: str | None, *, instead: bool = False) -> Self:
        """The conversation after a system message, unless `system` is None."""
        has_one = self.messages[0]["role"] in ROLES[:2]
        if system is None or (has_one and not instead):
            return self
        return replace(self, messages=({"role": SYSTEM, "content": system}, *self.messages[has_one:]))

    def with_examples(self, examples: Sequence[tuple[str, str]]) -> Self:
        """The conversation after questions with answers, which follow its system message."""
        start = int(self.messages[0]["role"] in ROLES[:2])
        turns = _in_turn([*chain(*examples)])
        return replace(self, messages=(*self.messages[:start], *turns, *self.messages[start:]))

    def prompt(self, key: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> str:
        """The text that a policy continues: up to the beginning of an answer, or a begun answer.

        As in TRL, a last message of the assistant is the beginning of the answer.
        """
        if (role := self.messages[-1]["role"]) in ROLES[:2]:
            raise LeftOutError(f"the last message is the {role}'s, not the user's")
        begun = role == ASSISTANT
        settings = {"continue_final_message": begun, "add_generation_prompt": not begun, **settings}
        return self.rendered(key, tokenizer, **settings)

    def text(self, key: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The whole conversation as text, without the end-of-sequence token if it ends with one."""
        text, eos = self.rendered(key, tokenizer), tokenizer.eos_token
        before, _, after = text.rpartition(eos) if eos else ("", "", text)
        return text if after.strip() else before  # templates have a newline after it

    def rendered(self, key: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> str:
        """The whole text that the chat template makes."""
        if tokenizer.chat_template is None:
            problem = f"{self.origin} is a conversation, but the tokenizer has no chat template"
            remedy = "start from a model whose tokenizer has one, or give texts"
            raise ConfigurationError(f"{problem}; {remedy}", key=key)

        messages = [dict(message) for message in self.messages]
        try:  # in transformers' sandbox
            text = tokenizer.apply_chat_template(messages, tokenize=False, **self.settings, **settings)
        except Exception as error:
            if is_exhausted(error):
                raise
            raise LeftOutError(f"the chat template refuses it: {brief(error)}") from error
        if not isinstance(text, str) or not text or not is_unicode(text):
            raise LeftOutError("the chat template makes no text of it")
        return text


Content = str | Conversation


def check_settings(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any], key: str) -> None:
    """Check that a tokenizer's chat templates read the settings that they are given."""
    if not settings:
        return
    templates: Any = tokenizer.chat_template or ""
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
    try:  # the tags are of an extension of transformers
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text)
        )
    except (jinja2.TemplateError, RecursionError):
        return  # the first row says so
    read = find_undeclared_variables(parsed)
    filled = {"messages", "add_generation_prompt", *tokenizer.special_tokens_map}
    if unread := sorted(settings.keys() - (read - filled)):
        named = ", ".join(sorted(read - filled - _FUNCTIONS)) or "none"
        raise ConfigurationError(f"the chat template has no setting {unread[0]}; it has: {named}", key=key)


def listed(text: str) -> Any:
    """The messages, or the one, that a text is, as JSON or as Python prints it; None for other texts.

    Example:
        >>> listed("[{'role': 'user', 'content': 'Is 7 even?'}]"), listed("[1]")
        ([{'role': 'user', 'content': 'Is 7 even?'}], None)
    """
    if not LISTED.match(text):
        return None
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError):
            return read(text)
    raise LeftOutError("a list of messages that is written as text, but neither as JSON nor as Python does")


def messages_of(value: Any) -> list[Message]:
    """Messages with known roles, whose contents are texts, of a value of unknown origin.

    Other forms are those of ShareGPT (from, value), of questions with their answers (input, output), and
    texts in turn. A content may be parts that are all text, or nothing beside calls.

    Example:
        >>> messages_of([{"from": "human", "value": "2+2?"}, {"role": "Assistant", "content": "4"}])
        [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}]
    """
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, (list, tuple)) or not turns:
        raise LeftOutError(f"{kind_of(value)} in place of a list of messages")
    if all(isinstance(turn, str) for turn in turns):
        return _in_turn(turns)
    messages = list[Message]()
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise LeftOutError(f"{kind_of(turn)} in place of a message")
        is_pair = turn.keys() >= {"input", "output"}
        messages += _in_turn((turn["input"], turn["output"])) if is_pair else [_message(turn)]
    return messages


def _in_turn(texts: Sequence[str]) -> list[Message]:
    pairs = zip(cycle(TURNS), texts, strict=False)
    return [_message({"role": role, "content": text}) for role, text in pairs]


def _message(turn: Mapping[str, Any]) -> Message:
    # Tables have None where a message lacks an entry of the others
    kept = {name: without_none(entry) for name, entry in turn.items() if entry is not None}
    role = kept.pop("role", kept.pop("from", None))
    content = kept.pop("content", kept.pop("value", "" if "tool_calls" in kept else None))
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    known = SPEAKERS.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        about = f"of the role {shown(role)}" if isinstance(role, str) else f"whose role is {kind_of(role)}"
        raise LeftOutError(f"a message {about}; known are {', '.join(ROLES)}")
    if not isinstance(content, str) or not is_unicode(content):
        raise LeftOutError(f"a message whose content is {kind_of(content)}")
    return {"role": known, "content": content, **kept}


def kind_of(value: Any) -> str:
    """What a value is, for reasons that are counted."""
    if isinstance(value, str):
        return "a text" if is_unicode(value) else "no Unicode text"
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", tuple: "a list"}
    return names.get(type(value), "nothing" if value is None else f"a {type(value).__name__}")


def is_left_alone(entry: Mapping[str, Any]) -> bool:
    """Whether a message, or a row, is marked as not to be trained on.

    Example:
        >>> is_left_alone({"role": "assistant", "content": "No.", "weight": 0})
        True
    """
    return any(bool(entry[name]) == off for name, off in MARKS.items() if entry.get(name) is not None)


def without_none(value: Any) -> Any:
    """A value of nested mappings and lists without the entries that are None."""
    if isinstance(value, Mapping):
        return {name: without_none(entry) for name, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def strings(value: Any) -> Iterator[str]:
    """All texts in a value of nested mappings and sequences, the names of entries included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in chain(value, value.values()) if isinstance(value, Mapping) else value:
            yield from strings(part)


def has_more(message: Message) -> bool:
    """Whether a message has thoughts or calls beside its text."""
    return any(message.get(name) for name in ("tool_calls", "reasoning_content", "thinking"))


def is_empty(message: Message) -> bool:
    """Whether a message says nothing: no text, which templates strip, no thoughts and no calls."""
    return not (message["content"].strip() or has_more(message))


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
    asked, answers = list[list[Message]](), list[list[Message]]()
    for prompt, text in zip(prompts, completions, strict=True):
        begun = prompt[-1]["role"] == ASSISTANT
        asked.append(list(prompt[:-1] if begun else prompt))
        answers.append([{"role": ASSISTANT, "content": (prompt[-1]["content"] if begun else "") + text}])
    return {"prompts": asked, "completions": answers}


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can contain but tokenizers cannot encode."""
    return re.search("[\ud800-\udfff]", text) is None


def shown(value: Any) -> str:
    """A value in about 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
