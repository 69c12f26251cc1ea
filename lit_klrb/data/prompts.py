"""Prompts, the beginnings of texts or as they are given, and pairs of answers to them; their batches."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import USER, Content, Conversation, LeftOutError, check_settings, is_messages
from lit_klrb.data.columns import PROMPT, TEACHER_PROMPT
from lit_klrb.data.encode import Encoded, beginning, encode, not_empty
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row
from lit_klrb.data.lengths import Selection
from lit_klrb.data.reader import Reader
from lit_klrb.errors import ConfigurationError
from lit_klrb.seeding import derive_seed


class Prompt(NamedTuple):
    """A prompt."""

    tokens: list[int]  # its token ids
    # The other columns of its row, for rewards. Those of a conversation have its messages under `prompt`.
    columns: Mapping[str, Any]
    is_given: bool = False  # whether it is used as a whole
    # Token ids of what the teacher, or the reference, reads instead; None for the same
    teacher: list[int] | None = None


@dataclass
class PromptReader:
    """Makes prompts of rows, for the student and the teacher; see `Prompts` for the settings.

    Raises:
        ConfigurationError: If there is a system prompt or a teacher's prompt for the beginnings of texts.
    """

    rows: InitVar[Sequence[Row]]
    student: Reader
    min_tokens: int
    max_tokens: int
    teacher_system_prompt: str | None = None
    teacher_examples: Sequence[tuple[str, str]] = ()
    teacher_template: Mapping[str, Any] | None = None  # by default the student's

    def __post_init__(self, rows: Sequence[Row]) -> None:
        student, own, system = self.student, self.teacher_template, self.student.system_prompt
        check_settings(student.tokenizer, own or {}, "teacher_chat_template_kwargs")
        # Its system message is put before the examples here
        template = student.template if own is None else own
        self.teacher = Reader(student.key, student.tokenizer, student.ends, template=template)
        self.teacher.refuse_controls("teacher_system_prompt", self.teacher_system_prompt or "")
        self.teacher.refuse_controls("teacher_examples", *chain(*self.teacher_examples))
        self.replaces_system = self.teacher_system_prompt is not None
        self.teacher_system = self.teacher_system_prompt if self.replaces_system else system
        differs = template != student.template
        self.is_another = self.replaces_system or bool(self.teacher_examples) or differs
        in_rows = [row.columns[TEACHER_PROMPT] for row in rows if row.columns.get(TEACHER_PROMPT) is not None]
        self.has_teacher = self.is_another or bool(in_rows)
        settings = {
            "system_prompt": system,
            "teacher_system_prompt": self.teacher_system_prompt,
            "teacher_examples": self.teacher_examples or None,
            student.key: next(filter(is_messages, in_rows), None),
        }
        # The first that makes conversations of texts
        asked = next((name for name, value in settings.items() if value is not None), None)
        self.as_chats = asked is not None
        if (self.as_chats or in_rows) and any(row.prompt is None for row in rows):
            column = "" if self.as_chats else f"the column {TEACHER_PROMPT} "
            needs = f"{column}needs conversations or texts in the column prompt"
            problem = f"{needs}; the prompts are the beginnings of texts"
            raise ConfigurationError(problem, key=asked or student.key)

    def read(self, index: int, row: Row) -> Prompt:
        """The prompt of a row."""
        if row.prompt is None:
            ids = encode("", not_empty(str(row.answers[0])), self.student.tokenizer).ids
            draw = random.Random(derive_seed(0, "prompt length", index))
            length = draw.randint(self.min_tokens, self.max_tokens)
            return Prompt(not_empty(ids[: len(beginning(self.student.tokenizer)) + length]), row.columns)
        content, columns, student = not_empty(row.prompt), row.columns, self.student
        if isinstance(content, str) and (self.as_chats or not student.are_texts(content, system=row.system)):
            chat = Conversation.of(content, USER, f"the prompt of {row.origin}")
            content = chat.with_system(row.system or None)
        if isinstance(content, Conversation):
            columns = {**columns, PROMPT: list(content.with_system(student.system_prompt).messages)}
        ids = not_empty(student.prompt(content))
        other = self._teachers(row, content) if self.has_teacher else None
        teacher = ids if other is None else self.teacher.prompt(other)
        return Prompt(ids, columns, True, teacher if self.has_teacher else None)

    def _teachers(self, row: Row, content: Content) -> Content | None:
        """What the teacher reads; None for the same as the student."""
        prompt = row.columns.get(TEACHER_PROMPT)
        if prompt is None:
            if isinstance(content, str) or not self.is_another:
                return None
            chat = content.with_system(self.teacher_system, instead=self.replaces_system)
            return chat.with_examples(self.teacher_examples)
        if isinstance(prompt, str):
            if isinstance(content, str):
                return not_empty(prompt)
            prompt = [{"role": USER, "content": not_empty(prompt)}]
        chat = Conversation.read(f"the {TEACHER_PROMPT} of {row.origin}", prompt)
        return chat.with_system(self.teacher_system).with_examples(self.teacher_examples)


def read_prompts(
    rows: Sequence[Row], reader: Reader, min_tokens: int, max_tokens: int, **teacher: Any
) -> list[Prompt]:
    """Prompts of all rows, see `PromptReader`; what is left out is counted, see `Selection`.

    Example:
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> row = Row(None, ("What a marvelous thriller! The acting was superb. Do not miss it!",))
        >>> reader = Reader("source", grammar_tokenizer(), ends=())
        >>> prompts = read_prompts([row] * 3, reader, min_tokens=2, max_tokens=8)
        >>> [len(prompt.tokens) for prompt in prompts]
        [5, 3, 4]
    """
    prompts = PromptReader(rows, reader, min_tokens, max_tokens, **teacher)
    return Selection(reader.key, "prompts", "given").read(rows, prompts.read)


def prompt_batch(prompts: Sequence[Prompt], pad_token_id: int) -> Batch:
    """Left-padded `tokens` and `attention_mask`, [P, N], and `rows` if there are other columns.

    A teacher that reads other prompts has them as `teacher_tokens` and `teacher_attention_mask`, [P, M].
    """
    rows = [dict(prompt.columns) for prompt in prompts]
    batch = pad([prompt.tokens for prompt in prompts], pad_token_id, side="left")
    teacher = [prompt.teacher for prompt in prompts if prompt.teacher is not None]
    if teacher:  # all have one, or none
        padded = pad(teacher, pad_token_id, side="left")
        batch |= {f"teacher_{name}": tensor for name, tensor in padded.items()}
    return {**batch, "rows": rows} if any(rows) else batch


def grammar_pairs(split: str, size: int) -> list[Row]:
    """Pairs of reviews of the embedded world, which follow the Bradley-Terry model.

    Of two reviews, the first is preferred with probability sigmoid(a - b), where a and b are their clipped
    log odds of being positive.

    Example:
        >>> grammar_pairs("test", size=2) == grammar_pairs("test", size=3)[:2]
        True
    """
    grammar = ReviewGrammar()
    texts = [review.text for review in grammar.reviews(2 * size, derive_seed(0, "pairs", split))]
    pairs = []
    for number, (first, second) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        odds = grammar.clipped_log_odds(first) - grammar.clipped_log_odds(second)
        draw = random.Random(derive_seed(0, "preferred", split, number)).random()
        first_is_better = draw < 1 / (1 + math.exp(-odds))
        pairs.append(Row("", (first, second) if first_is_better else (second, first)))
    return pairs


def differing(chosen: list[int], rejected: list[int]) -> tuple[list[int], list[int]]:
    """Token ids of two answers; if they do not differ, the row is left out."""
    if chosen == rejected:
        raise LeftOutError("chosen equals rejected")
    return chosen, rejected


class PreferencePair(NamedTuple):
    """Token ids of a prompt and two completions, and the log-probability of each under the reference."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_ref_logprob: float = 0.0
    rejected_ref_logprob: float = 0.0

    @classmethod
    def of(cls, chosen: Encoded, rejected: Encoded) -> "PreferencePair":
        """Of two answers to a prompt, which is what both have before the first token of an answer."""
        one, other = differing(chosen.ids, rejected.ids)
        most = min(chosen.start, rejected.start)
        start = next((n for n in range(most) if one[n] != other[n]), most)
        if not start:
            raise LeftOutError("an empty prompt")
        return cls(one[:start], one[start:], other[start:])


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> Batch:
    """Collate B pairs into 2B sequences: all chosen completions, then all rejected ones.

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
