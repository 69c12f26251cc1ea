"""Prompts: the first few tokens of texts, or given prompts and conversations as they are."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import USER, Conversation, is_messages, is_unicode, shown
from lit_klrb.data.encode import LeftOutError, Reader, beginning, encode
from lit_klrb.data.kinds import PROMPT, TEACHER_PROMPT, Content, Row
from lit_klrb.errors import ConfigurationError
from lit_klrb.seeding import derive_seed


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        tokens: Its token ids.
        columns: The other columns of its row, for rewards. Those of a conversation have its messages under
            `prompt`.
        is_given: Whether it is used as a whole.
        teacher: Token ids of what the teacher, or the reference, reads instead; None for the same.
    """

    tokens: list[int]
    columns: Mapping[str, Any]
    is_given: bool = False
    teacher: list[int] | None = None


class PromptReader:
    """Makes prompts of rows.

    The tokenizer's chat template makes the text of a conversation, special tokens included. The teacher reads
    its entry of the column `teacher_prompt` instead, a text or a conversation, or else the prompt's
    conversation with its own system message; examples come before both.

    Args:
        rows: All rows that will be read, which are of the same kind.
        tokenizer: The policy's tokenizer.
        min_tokens: Minimum length of the beginning of a text; a shorter one is a prompt as a whole.
        max_tokens: Maximum length; that of prompt i depends on i only.
        system_prompt: A system message for conversations without one; given texts become the user's message.
        teacher_system_prompt: The teacher's system message, in place of any other.
        teacher_examples: Questions with answers, which only the teacher reads.
        key: The argument that names their source, for error messages.
        template: Further settings of the policy's chat template.
        teacher_template: Further settings for the teacher; None for the policy's.

    Raises:
        ConfigurationError: If there is a system prompt or a teacher's prompt for the beginnings of texts.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        min_tokens: int,
        max_tokens: int,
        system_prompt: str | None = None,
        teacher_system_prompt: str | None = None,
        teacher_examples: Sequence[tuple[str, str]] = (),
        key: str = "source",
        template: Mapping[str, Any] | None = None,
        teacher_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.key, self.lengths, self.examples = key, (min_tokens, max_tokens), teacher_examples
        self.student = Reader(key, tokenizer, (), system_prompt, template)
        instead = teacher_system_prompt is not None
        self.teacher_system = teacher_system_prompt if instead else system_prompt
        self.teacher = Reader(
            key, tokenizer, (), None, template if teacher_template is None else teacher_template
        )
        self.is_another = instead or bool(teacher_examples) or self.teacher.template != self.student.template
        messages = {"system_prompt": system_prompt, "teacher_system_prompt": teacher_system_prompt}
        named = [name for name, text in messages.items() if text is not None]
        named += ["teacher_examples"] if teacher_examples else []
        self.columns = any(row.columns.get(TEACHER_PROMPT) is not None for row in rows)
        given = any(is_messages(row.columns.get(TEACHER_PROMPT)) for row in rows)
        # All are of the same kind
        asked = next(iter(named), key if given else None)
        if (asked or self.columns) and not all(row.is_prompt for row in rows):
            raise ConfigurationError(
                f"{'' if asked else f'the column {TEACHER_PROMPT} '}needs conversations or texts in the "
                "column prompt; the prompts are the beginnings of texts",
                key=asked or key,
            )
        self.as_chats, self.instead = asked is not None, instead
        self.has_teacher = self.is_another or self.columns

    def read(self, index: int, row: Row) -> Prompt:
        """The prompt of a row.

        Raises:
            LeftOutError: If it is empty or contains a control token.
            ConfigurationError: If the template refuses a conversation.
        """
        if row.prompt is None:
            (text,) = row.answers
            ids = encode("", str(text), self.student.tokenizer).ids
            added = len(beginning(self.student.tokenizer))
            length = random.Random(derive_seed(0, "prompt length", index)).randint(*self.lengths)
            ids = ids[: added + length]
            return Prompt(_not_empty(ids), row.columns)
        chat, columns = self._chat(row.prompt), row.columns
        if isinstance(chat, Conversation):
            chat = chat.with_system(self.student.system)
            columns = {**columns, PROMPT: list(chat.messages)}
        ids = _not_empty(self.student.prompt(chat) if chat else [])
        other = self._teachers(row, chat)
        teacher = None if not self.has_teacher else ids if other is None else self.teacher.prompt(other)
        return Prompt(ids, columns, True, teacher)

    def _chat(self, content: Content) -> Content:
        if isinstance(content, Conversation) or not self.as_chats:
            return content
        return Conversation(({"role": USER, "content": content},), f"the prompt {shown(content)}")

    def _teachers(self, row: Row, chat: Content) -> Content | None:
        """What the teacher reads; None for the same as the student."""
        given = row.columns.get(TEACHER_PROMPT)
        if given is None:
            if isinstance(chat, str) or not self.is_another:
                return None
            own = self._chat(row.prompt or "")
            assert isinstance(own, Conversation)
            return own.with_system(self.teacher_system, instead=self.instead).with_examples(self.examples)
        place = f"the {TEACHER_PROMPT} of {shown(row.text)}"
        if isinstance(given, str):
            if not (given and is_unicode(given)):
                problem = f"{place} is {shown(given)}; Unicode characters are expected"
                raise ConfigurationError(problem, key=self.key)
            if isinstance(chat, str):
                return given
            given = [{"role": USER, "content": given}]
        conversation = Conversation.read(self.key, place, given)
        return conversation.with_system(self.teacher_system).with_examples(self.examples)


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise LeftOutError("empty")
    return ids


def read_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *args: Any, **settings: Any
) -> list[Prompt]:
    """Prompts of all rows, see `PromptReader`; a row that cannot be read is refused.

    Example:
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> row = Row(None, ("What a marvelous thriller! The acting was superb. Do not miss it!",))
        >>> prompts = read_prompts([row] * 3, grammar_tokenizer(), min_tokens=2, max_tokens=8)
        >>> [len(prompt.tokens) for prompt in prompts]
        [5, 3, 4]
    """
    reader = PromptReader(rows, tokenizer, *args, **settings)
    prompts = []
    for index, row in enumerate(rows):
        try:
            prompts.append(reader.read(index, row))
        except LeftOutError as error:
            place = row.place or f"prompt {index + 1}"
            raise ConfigurationError(f"{place} cannot be read: {error}", key=reader.key) from error
    return prompts


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
