"""LightningDataModules: texts as language-model batches, prompts, and preferences as pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, final

import torch

from lit_klrb.data.abstract import GivenAnswers, Prompts, WholeTexts
from lit_klrb.data.base import LEAST, log
from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import Conversation, LeftOutError, is_left_alone
from lit_klrb.data.corpora import GRAMMAR, Source, held_out_prompts
from lit_klrb.data.encode import Encoded
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row
from lit_klrb.data.lengths import Selection
from lit_klrb.data.prompts import PreferencePair, Prompt, collate_pairs
from lit_klrb.data.reader import Reader
from lit_klrb.errors import ConfigurationError


@cache
def _entropy_of_reviews() -> float:
    """Of the embedded world, in nats per token, once for all evaluations."""
    # Without a beginning-of-sequence token the first token is not predicted
    return ReviewGrammar().entropy_per_token(given=1)


@final
@dataclass(kw_only=True, eq=False, repr=False)
class TextDataModule(WholeTexts):
    """Texts, conversations, or prompts with completions, for language modelling.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder or a file with the column text, the
            columns prompt and completion, or messages: conversations, of which the tokenizer's chat template
            makes texts.
        train_on: What the loss is of: the answers of conversations and completions, or all tokens.
    """

    contents = ("texts", "texts")
    want = "texts"

    train_on: Literal["answers", "all"] = "answers"

    def entropy_per_token(self) -> float | None:
        """The lowest cross-entropy that any model can reach, in nats per token; None if it is unknown."""
        return _entropy_of_reviews() if self.source == GRAMMAR else None

    def encoded(self, reader: Reader, row: Row, selection: Selection) -> Encoded:
        """Token ids of a row with its end, and which of them are trained on."""
        (answer,) = row.answers
        answers_only = self.train_on == "answers"
        marked = isinstance(answer, Conversation) and any(map(is_left_alone, answer.messages))
        if marked and not answers_only:
            self.say(f"{self.source}: train_on=all trains also on messages that are marked as left out")
        if row.prompt is None:
            ids, mask = reader.whole(answer, answers_only)
        else:
            ids, mask = reader.answered(row.prompt, answer, row.system)
        return selection.within(Encoded(ids, mask if answers_only else [True] * len(ids)))

    def visible(self, example: Encoded) -> str:
        """See the base class; of several answers, the first."""
        return self.show(example.ids[: example.start], example.ids[example.start :])

    def collate(self, split: str, examples: Sequence[Encoded]) -> Batch:
        """Right-padded `tokens`, `attention_mask` and the `mask` of what is trained on, [B, N]."""
        batch = pad([example.ids for example in examples], self.learner.tokenizer.pad_token_id, side="right")
        masks = pad([[int(kept) for kept in example.mask] for example in examples], 0, side="right")
        return {**batch, "mask": masks["tokens"].bool()}


@final
@dataclass(kw_only=True, eq=False, repr=False)
class LabelledTextDataModule(WholeTexts):
    """Texts with labels, for a classifier; texts without a label are skipped."""

    contents = ("labelled texts", "labelled texts")
    want = "labels"

    def load(self, split: str) -> Sequence[Row]:
        """The labelled rows of a split of the source."""
        rows = super().load(split)
        labelled = [row for row in rows if row.label is not None or row.problem]
        if unknown := len(rows) - len(labelled):
            log.warning(f"{self.source}: {unknown} of {len(rows)} {split} rows are left out: no label")
        if not labelled:
            needs = f"{split} split; rows need a label, 1 (positive) or 0 (negative)"
            raise ConfigurationError(f"{self.source} has no labelled text in its {needs}", key="source")
        return labelled

    def encoded(self, reader: Reader, row: Row, selection: Selection) -> tuple[list[int], int]:
        """Token ids and the label of a text."""
        return self.classified(reader, row, selection)[0], int(row.label or 0)

    def visible(self, example: tuple[list[int], int]) -> str:
        """See the base class."""
        return f"{self.show(example[0])} | {example[1]}"

    def collate(self, split: str, examples: Sequence[tuple[list[int], int]]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [B, N], and `labels`, [B]: 1 is positive."""
        texts, labels = zip(*examples, strict=True)
        batch = pad(texts, self.learner.tokenizer.pad_token_id, side="right")
        return {**batch, "labels": torch.tensor(labels)}


@final
@dataclass(kw_only=True, eq=False, repr=False)
class TextPairDataModule(WholeTexts):
    """Pairs of a preferred and a rejected text, for a reward model.

    Args:
        source: "grammar" for pairs of reviews of the embedded world, a hub id, a folder or a file with the
            columns chosen and rejected, and maybe prompt: texts or conversations.
    """

    contents = ("pairs of texts", "pairs of texts")
    want = "preferences"

    def encoded(self, reader: Reader, row: Row, selection: Selection) -> tuple[list[int], list[int]]:
        """Token ids of the chosen and the rejected text of a pair, each with its prompt."""
        chosen, rejected = self.classified(reader, row, selection)
        return chosen, rejected

    def visible(self, example: tuple[list[int], list[int]]) -> str:
        """See the base class."""
        return self.show(*example)

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [2B, N]: all chosen texts, then all rejected ones."""
        chosen, rejected = zip(*examples, strict=True)
        return pad([*chosen, *rejected], self.learner.tokenizer.pad_token_id, side="right")


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PromptDataModule(Prompts):
    """Prompts for training and evaluation.

    Example: what `check` shows of a data set, here the generated reviews.

        >>> from types import SimpleNamespace
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> data = PromptDataModule(source="grammar", train_size=16)
        >>> learner = SimpleNamespace(tokenizer=grammar_tokenizer(), trained=SimpleNamespace(config=None))
        >>> shown = data.preview(learner)
        >>> shown["rows"], shown["left_out"], shown["first"]
        (16, {}, 'I watched this movie last |')
    """

    contents = ("prompts", "prompts")

    def examples(self, split: str) -> list[Prompt]:
        """The prompts."""
        return self.prompts(split)


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceDataModule(Prompts, GivenAnswers):
    """Preference pairs for training, prompts for evaluation.

    The module that is trained makes the pairs from the training prompts (see `DPOModule.preference_pairs`)
    unless `preferences` is given.

    Args:
        batch_size: Pairs per training batch.
        preferences: A data set of preferences, without the prompts that the source holds out: a hub id, a
            folder or a file with the columns chosen and rejected, and prompt or a common beginning: texts or
            conversations. `subset`, `split` and `columns` are its own, too.
    """

    contents = ("preferences", "prompts")

    preferences: str | None = None

    def load(self, split: str) -> Sequence[Row]:
        """The pairs that are given for the train split, otherwise rows of the source."""
        if split != "train" or self.preferences is None:
            return super().load(split)
        settings = self.subset, self.split, None, tuple(self.columns.items())
        pairs = Source(self.preferences, "pairs", *settings, "preferences", splits=False)
        return self.drawn(pairs, split, self.train_size)

    def examples(self, split: str) -> Sequence[Any]:
        """Pairs for the train split if they are given, otherwise prompts."""
        if split != "train" or self.preferences is None:
            prompts = self.prompts(split)
            if any(prompt.teacher is not None for prompt in prompts):
                problem = "gives the reference prompts of its own, which preferences do not support"
                remedy = "leave out teacher_system_prompt, teacher_examples and the column teacher_prompt"
                raise ConfigurationError(f"{self.source} {problem}: {remedy}", key="source")
            return prompts
        key, limit = "preferences", self.limit
        reader, evaluated = self.reader(key), held_out_prompts(self.origin, max(LEAST, self.eval_size))

        def make(index: int, row: Row) -> PreferencePair:
            if row.prompt == "":
                raise LeftOutError("an empty prompt" if any(row.answers) else "empty")
            if row.text in evaluated:
                raise LeftOutError("a prompt of an evaluation")
            within, prompt = self.selections["train"].within, row.prompt or ""
            return PreferencePair.of(*(within(reader.answered(prompt, a, row.system)) for a in row.answers))

        return self.read("train", self.rows["train"], make, limit, key)

    def prepared(self, examples: Sequence[Any]) -> Sequence[Any]:
        """Pairs with the reference's log-probabilities, or those that the module makes of prompts.

        Of rows without an upper bound only those that the steps use.
        """
        used, module = None if self.train_size else self.rows_of_steps, cast(Any, self.learner)
        prepare = module.preference_pairs if self.preferences is None else module.given_pairs
        pairs: Sequence[Any] = prepare(examples[:used])
        return pairs

    def visible(self, example: Any) -> str:
        """See the base class."""
        is_pair = isinstance(example, PreferencePair)
        return self.show(*example[:3]) if is_pair else super().visible(example)

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """`collate_pairs` for the train split, `prompt_batch` for the others."""
        if split != "train":
            return super().collate(split, examples)
        return collate_pairs(examples, self.learner.tokenizer.pad_token_id)
