"""Abstract data modules: whole texts, and prompts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_klrb.data.base import LONGEST, CorpusDataModule
from lit_klrb.data.batches import Batch
from lit_klrb.data.encode import Encoded
from lit_klrb.data.kinds import Row
from lit_klrb.data.lengths import Selection, check_context_length, context_length
from lit_klrb.data.prompts import Prompt, PromptReader, differing, prompt_batch
from lit_klrb.data.reader import Reader
from lit_klrb.errors import check_at_least


@dataclass(kw_only=True, eq=False, repr=False)
class GivenAnswers(CorpusDataModule, ABC):
    """Rows with texts or answers of a maximum number of tokens.

    Args:
        max_tokens: Rows with more tokens are left out, or see `overlong`; by default the model's context
            length, at most 1,024. What is sampled has a limit of its own.
    """

    max_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, max_tokens=LONGEST if self.max_tokens is None else self.max_tokens)

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a row."""
        model = self.learner.trained
        if self.max_tokens is None:
            return min(context_length(model) or LONGEST, LONGEST)
        setting = {"key": "max_tokens", "sequence": str(self.max_tokens)}
        check_context_length(model, self.max_tokens, "the model", **setting)
        return self.max_tokens


@dataclass(kw_only=True, eq=False, repr=False)
class WholeTexts(GivenAnswers, ABC):
    """Whole texts."""

    batch_size: int = 64
    generated_size: int = 20_000
    eval_size: int = 512
    eval_batch_size: int = 64

    def examples(self, split: str) -> list[Any]:
        """Token ids of each row."""
        reader, limit = self.reader(), self.limit

        def make(index: int, row: Row) -> Any:
            return self.encoded(reader, row, self.selections[split])

        return self.read(split, self.rows[split], make, limit)

    def classified(self, reader: Reader, row: Row, selection: Selection) -> list[list[int]]:
        """Token ids of the texts of a row, for a classifier; a row that is cut counts once."""
        prompt, limit = row.prompt or "", selection.cut_to
        texts = [reader.classified(prompt, answer, row.system).ids for answer in row.answers]
        is_cut = limit is not None and max(map(len, texts)) > limit
        if is_cut:  # by the tokenizer, which keeps what it puts after a text
            texts = [reader.classified(prompt, answer, row.system, limit).ids for answer in row.answers]
        if len(texts) > 1:
            differing(*texts)
        selection.within(Encoded(max(texts, key=len), [True]))
        selection.cut += is_cut
        return texts

    @abstractmethod
    def encoded(self, reader: Reader, row: Row, selection: Selection) -> Any:
        """The token ids of a row."""


@dataclass(kw_only=True, eq=False, repr=False)
class Prompts(CorpusDataModule, ABC):
    """Prompts: the first few tokens of texts, or given prompts as they are.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder or a file with the column prompt (texts
            or conversations, used as they are), messages (conversations, without the last answer), text, of
            which the beginnings are used, or preferences, of which the prompts are.
        batch_size: Prompts per training batch; the module sets the number of completions of each.
        eval_size: Number of prompts of the common evaluation, the same for every run.
        eval_batch_size: Prompts per evaluation batch; the sampled completions depend on it.
        min_prompt_tokens: Minimum length of the beginning of a text.
        max_prompt_tokens: Maximum length of a beginning; each one's length is drawn from this range.
        system_prompt: A system message for conversations without one; texts in the column prompt become the
            user's message.
        teacher_system_prompt: The system message that the teacher, or the reference, reads in place of that
            of the policy; texts in the column prompt become the user's message for both. In the column
            teacher_prompt each row may have what it reads instead of the prompt, a text or a conversation.
        teacher_examples: Pairs of a question and an answer, which the teacher reads as earlier messages of
            the conversation.
        teacher_chat_template_kwargs: Settings of the chat template for the teacher; by default the policy's.
    """

    want = "prompts"

    batch_size: int = 32
    generated_size: int = 5_000
    eval_size: int = 256
    eval_batch_size: int = 64
    min_prompt_tokens: int = 2
    max_prompt_tokens: int = 8
    teacher_system_prompt: str | None = None
    teacher_examples: tuple[tuple[str, str], ...] = ()
    teacher_chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, min_prompt_tokens=self.min_prompt_tokens)
        check_at_least(self.min_prompt_tokens, max_prompt_tokens=self.max_prompt_tokens)

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts, which depend on the source, the system prompt and the tokenizer.

        Given ones that leave no room for a completion in the context of policy or reference are left out.
        """
        learner, rows = self.learner, self.rows[split]
        reader = PromptReader(
            rows,
            self.reader(),
            self.min_prompt_tokens,
            self.max_prompt_tokens,
            self.teacher_system_prompt,
            self.teacher_examples,
            self.teacher_chat_template_kwargs,
        )
        new = getattr(learner, "max_new_tokens", 1)
        policy_limit = context_length(learner.trained)
        reference_limit = context_length(getattr(learner, "reference", None) or learner.trained)

        def make(index: int, row: Row) -> Prompt:
            prompt = reader.read(index, row)
            selection = self.selections[split]
            for ids, selection.limit, selection.name in (
                (prompt.teacher, reference_limit, "the reference's context length"),
                (prompt.tokens if prompt.is_given else None, policy_limit, "the policy's context length"),
            ):
                if ids is not None:
                    selection.within(Encoded(ids, []), new)
            return prompt

        prompts = self.read(split, rows, make)
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        sequence = f"{new} after a prompt of {longest} tokens"
        check_context_length(
            learner.trained, longest + new, "the policy", key="max_new_tokens", sequence=sequence
        )
        return prompts

    def visible(self, example: Any) -> str:
        """See the base class; after the bar, what the teacher reads."""
        shown: str = self.show(example.tokens, *([] if example.teacher is None else [example.teacher]), [])
        return shown.rstrip(" ")

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """See `prompt_batch`."""
        return prompt_batch(examples, self.learner.tokenizer.pad_token_id)
