"""Where answers stand in the text that a chat template makes of a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.chat import Conversation, LeftOutError, has_more, shown

Span = tuple[int, int]
# Stands for an answer, to see what a template puts before it
MARK = "0#answer#0"
NO_PROMPT = "has no generation prompt: answers begin with what it puts before them"


@dataclass(frozen=True)
class Turns:
    """The messages of a conversation in its text."""

    chat: Conversation
    key: str  # the argument that names its source, for error messages
    tokenizer: PreTrainedTokenizerBase
    ends: Sequence[str]  # the tokens that can end a completion
    controls: Sequence[str]  # all control tokens
    say: Callable[[str], None]  # called with what the chat template does unasked

    @cached_property
    def text(self) -> str:
        """The text of the whole conversation."""
        return self._first(len(self.chat.messages))

    def spans(self, answers: Sequence[int]) -> list[Span]:
        """The characters of each answer, with its end; answers are the messages of these numbers."""
        text, spans = self.text, list[Span]()
        for number in answers:
            start = self._first(number, add_generation_prompt=True) if number else self._opening()
            if start is None:
                self.say("does not show where a first message of the assistant begins; it is not trained on")
                continue
            if not text.startswith(start):
                if number == answers[-1] and not spans:
                    problem = "the chat template gives the prompt another text once the answer is there"
                    raise LeftOutError(problem)
                self.say("changes earlier turns once an answer is there; they are not trained on")
                continue
            if number and not spans and start == self._first(number):
                self.say(NO_PROMPT)
            end = self._end(number, len(start))
            if end == len(start):
                self.say("does not show where an answer ends before later messages; it is not trained on")
            elif text[len(start) : end].strip() in ("", *self.ends):  # such as a call that it does not read
                self.say("writes nothing of an answer; its end is not trained on")
            else:
                spans.append((self._after_added(number, len(start), end), end))
        return spans

    def _after_added(self, number: int, start: int, end: int) -> int:
        """Where an answer begins after what the template puts before it, such as thoughts that are empty."""
        messages, content = list(self.chat.messages), self.chat.messages[number]["content"].strip()
        if has_more(messages[number]) or self.text[start:end].lstrip().startswith(content):
            return start
        messages[number] = {**messages[number], "content": MARK}
        marked = replace(self.chat, messages=tuple(messages)).rendered(self.key, self.tokenizer)
        index = marked.find(MARK, start)
        added = self.text[start:index].strip()
        if index < 0 or marked[:index] != self.text[:index] or not added:
            return start
        if number and self.text[:start] == self._first(number):
            return start  # without a generation prompt this is the answer's beginning
        self.say(f"puts {shown(added)} before answers, which is not trained on")
        return index

    def _first(self, number: int, **settings: Any) -> str:
        """The text of the first messages."""
        first = replace(self.chat, messages=self.chat.messages[:number])
        return first.rendered(self.key, self.tokenizer, **settings)

    def _opening(self) -> str | None:
        """What stands before an answer that is the first message; None where no generation prompt shows it.

        Templates cannot render a prompt of no messages.
        """
        try:
            alone = self._first(1)
            prompt = self._first(1, add_generation_prompt=True).removeprefix(alone)
        except LeftOutError:  # not without the user's message
            return None
        before, mark, _ = alone.partition(prompt) if prompt.strip() else ("", "", "")
        return before + mark or None

    def _end(self, number: int, start: int) -> int:
        """Where an answer ends: with the first end in what the template writes for it, or with all of that.

        What it writes for later messages is theirs, whether or not there is an end before it.
        """
        is_last = number + 1 == len(self.chat.messages)
        text, through = self.text, self.text if is_last else self._first(number + 1)
        limit = len(through)
        if text.startswith(through):
            # Templates may write the end only once a message follows
            limit += next((len(end) for end in self.ends if text.startswith(end, limit)), 0)
            return self._first_end(start, limit) or limit
        self.say("changes an answer once there are later messages")
        end = self._first_end(start, limit)
        if end and self.chat.messages[number + 1]["content"] not in text[start:end]:
            return end
        # A beginning is gone, such as thoughts, or an end, such as an EOS after the last message
        answer = through[start:]
        kept = next(len(answer) - n for n in range(len(answer) + 1) if text.startswith(answer[n:], start))
        limit = max(start + kept, self._common(through))
        return self._first_end(start, limit) or limit

    def _first_end(self, start: int, limit: int) -> int:
        """Where the first end between two places ends; 0 if there is none."""
        starts = [(self.text.find(end, start, limit), len(end)) for end in self.ends]
        return min((first + length for first, length in starts if first >= 0), default=0)

    def _common(self, other: str) -> int:
        """Length of what the text has in common with another one, without a part of a control token."""
        pairs = enumerate(zip(self.text, other, strict=False))
        length = next((n for n, (one, another) in pairs if one != another), min(len(self.text), len(other)))
        starts = [
            (text.rfind(token, 0, length + len(token) - 1), len(token))
            for text in (self.text, other)
            for token in self.controls
        ]
        return min((first for first, size in starts if 0 <= first < length < first + size), default=length)
