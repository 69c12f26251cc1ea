"""Conversations: lists of messages, and the texts that a tokenizer's chat template makes of them."""

import hashlib
import json
import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError, refusing

# `role`, `content`, and whatever else the template reads.
Message = Mapping[str, Any]
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, "developer", USER, ASSISTANT, "tool")
# What templates call.
_FUNCTIONS = {*jinja2.defaults.DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}
# What a template may take: seconds, and memory beside that of this process
SECONDS, BYTES = 10, 2**30
# Whether a template makes a text in time, which is tried once for each.
_TRIED: dict[str, bool] = {}


@dataclass(frozen=True)
class Conversation:
    """Messages with roles, as TRL and chat templates have them."""

    messages: tuple[Message, ...]  # at least one
    place: str  # where they come from, for error messages
    # What the template reads beside them: `chat_template_kwargs`, and the row's tools
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, key: str, place: str, value: Any, tools: Any = None) -> Self:
        """Check a value of unknown origin: a list of messages with known roles, whose contents are text.

        Args:
            key: The argument that names its source, for the error message.
            place: Where it comes from.
            value: The list; a content may be parts that are all text.
            tools: What the assistant may call, for the template: a list, or one as JSON.
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
        pairs = [((USER, question), (ASSISTANT, answer)) for question, answer in examples]
        turns = [{"role": role, "content": text} for pair in pairs for role, text in pair]
        return replace(self, messages=(*self.messages[:start], *turns, *self.messages[start:]))

    def prompt(self, key: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that a policy continues: up to the beginning of an answer, or a begun answer.

        As in TRL, a last message of the assistant is the beginning of the answer.
        """
        if (role := self.messages[-1]["role"]) in ROLES[:2]:
            raise ConfigurationError(
                f"{self.place} ends with a {role} message; a user's is expected", key=key
            )
        begun = role == ASSISTANT
        return self.rendered(key, tokenizer, continue_final_message=begun, add_generation_prompt=not begun)

    def text(self, key: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The whole conversation as text, without the end-of-sequence token if it ends with one."""
        text, eos = self.rendered(key, tokenizer), tokenizer.eos_token
        before, _, after = text.rpartition(eos) if eos else ("", "", text)
        return text if after.strip() else before  # templates have a newline after it

    def rendered(self, key: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> str:
        """The whole text that the chat template makes."""
        if tokenizer.chat_template is None:
            problem = f"{self.place} is a conversation, but the tokenizer has no chat template"
            remedy = "start from a model whose tokenizer has one, or give texts"
            raise ConfigurationError(f"{problem}; {remedy}", key=key)

        def render() -> Any:  # in transformers' sandbox
            messages = [dict(message) for message in self.messages]
            return tokenizer.apply_chat_template(messages, tokenize=False, **self.settings, **settings)

        template = str(tokenizer.chat_template)
        if template not in _TRIED:
            _TRIED[template] = ends_in_time(render)
        place = f"{self.place}: the chat template"
        if not _TRIED[template]:
            raise ConfigurationError(f"{place} takes too much time or memory", key=key)
        with refusing(f"{place} refuses it", key=key):
            text = render()
        if not isinstance(text, str) or not text or not is_unicode(text):
            raise ConfigurationError(f"{place} makes no text of it", key=key)
        return text


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
    ours = {"messages", "add_generation_prompt", *tokenizer.special_tokens_map}
    if unread := sorted(settings.keys() - (read - ours)):
        named = ", ".join(sorted(read - ours - _FUNCTIONS)) or "none"
        raise ConfigurationError(f"the chat template has no setting {unread[0]}; it has: {named}", key=key)


def _as_text(message: Any) -> Any:
    """A message whose content is a text: the parts of one that are all text, or nothing beside calls."""
    if not isinstance(message, Mapping):
        return message
    # Tables have None where a message lacks an entry of the others
    kept = {name: without_none(entry) for name, entry in message.items() if entry is not None}
    content = kept.get("content", "" if "tool_calls" in kept else None)
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    return kept if content is None else {**kept, "content": content}


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


def is_empty(message: Message) -> bool:
    """Whether a message says nothing: no text, which templates strip, no thoughts and no calls."""
    beside = (message.get(name) for name in ("tool_calls", "reasoning_content", "thinking"))
    return not (message["content"].strip() or any(beside))


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
    given, answers = list[list[Message]](), list[list[Message]]()
    for prompt, text in zip(prompts, completions, strict=True):
        begun = prompt[-1]["role"] == ASSISTANT
        given.append(list(prompt[:-1] if begun else prompt))
        answers.append([{"role": ASSISTANT, "content": (prompt[-1]["content"] if begun else "") + text}])
    return {"prompts": given, "completions": answers}


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can contain but tokenizers cannot encode."""
    return re.search("[\ud800-\udfff]", text) is None


def shown(value: Any) -> str:
    """A value in about 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def ends_in_time(work: Callable[[], object]) -> bool:
    """Whether a function of Python alone ends within ten seconds and a gigabyte, whatever its result."""
    memory, statm = None, Path("/proc/self/statm")
    if statm.exists():
        memory = int(statm.read_text().split()[0]) * resource.getpagesize() + BYTES
    before = os.environ.setdefault("TOKENIZERS_PARALLELISM", "")  # or their library warns of the fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in the parent
        child = os.fork()
    if child == 0:  # it ends with 1 where memory is exhausted; what else is raised, the parent raises again
        try:
            if memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            work()
        except MemoryError:
            os._exit(1)
        finally:
            os._exit(0)
    if not before:
        del os.environ["TOKENIZERS_PARALLELISM"]
    end = time.monotonic() + SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitpid(child, 0)[1] == 0
