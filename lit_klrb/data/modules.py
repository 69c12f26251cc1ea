"""LightningDataModules: reviews as language-model batches, prompts, and preferences as pairs."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from lit_klrb.data.base import CorpusDataModule
from lit_klrb.data.batches import Batch, classifier_batch, pad
from lit_klrb.data.corpora import GRAMMAR, HELD_OUT, MESSAGES, TEXT, load_reviews, pick
from lit_klrb.data.encoding import encode, end_tokens, ended
from lit_klrb.data.grammar import Review, ReviewGrammar
from lit_klrb.data.interfaces import PairMaker
from lit_klrb.data.pairs import TokenPair, load_pairs, usable_pairs, whole_texts
from lit_klrb.data.preferences import (
    ChatPreference,
    Preference,
    as_tokens,
    collate_pairs,
    load_preferences,
)
from lit_klrb.data.prompts import COLUMNS, Prompt, prompt_batch, read_prompts
from lit_klrb.errors import ConfigurationError, check_at_least


@dataclass(kw_only=True, eq=False, repr=False)
class WholeTexts(CorpusDataModule, ABC):
    """Complete texts of a maximum number of tokens.

    Args:
        batch_size: Reviews per training batch.
        train_size: Number of training reviews; 0 for all.
        eval_size: Number of validation and of test reviews.
        eval_batch_size: Reviews per evaluation batch.
        max_tokens: Longer reviews are truncated.
    """

    batch_size: int = 64
    train_size: int = 20_000
    eval_size: int = 512
    eval_batch_size: int = 64
    max_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, max_tokens=self.max_tokens)

    def check_context_length(self) -> None:
        """Check that texts fit into the model's context.

        Raises:
            ConfigurationError: If `max_tokens` exceeds the model's context length.
        """
        positions = getattr(self.learner.trained.config, "max_position_embeddings", None)
        if positions is not None and self.max_tokens > positions:
            raise ConfigurationError(
                f"{self.max_tokens} exceeds the model's context length, {positions}", key="max_tokens"
            )


@dataclass(kw_only=True, eq=False, repr=False)
class WholeReviews(WholeTexts, ABC):
    """Complete reviews, truncated to a maximum number of tokens.

    Args:
        train_splits: The splits of the source that are trained on together, such as train and unsupervised.
    """

    train_splits: tuple[str, ...] = ("train",)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.train_splits
        if not names or len(set(names)) < len(names) or set(names) & set(HELD_OUT):
            raise ConfigurationError(
                f"must name different splits, and none of {', '.join(HELD_OUT)}, got {list(names)}",
                key="train_splits",
            )

    def load(self, split: str) -> list[Review]:
        """The reviews of a split; those of several training splits are shuffled together."""
        size, names = self.sizes[split], self.train_splits if split == "train" else (split,)
        parts = [load_reviews(self.source, name, size=size, columns=self.columns) for name in names]
        reviews = [review for part in parts for review in part]
        return reviews if len(parts) == 1 else pick(self.source, {split: reviews}, split, size)


@final
@dataclass(kw_only=True, eq=False, repr=False)
class ReviewDataModule(WholeReviews):
    """Reviews or conversations with an end-of-sequence token, for language modelling.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            column text, or messages: conversations, of which the tokenizer's chat template makes texts.
        system_prompt: A system message for conversations without one.
    """

    contents = ("reviews", "reviews")
    columns = (TEXT, MESSAGES)

    system_prompt: str | None = None

    def entropy_per_token(self) -> float | None:
        """The lowest cross-entropy that any model can reach, in nats per token; None if it is unknown."""
        # Without a beginning-of-sequence token the first token is not predicted
        return ReviewGrammar().entropy(given=1).per_token if self.source == GRAMMAR else None

    def examples(self, split: str) -> Sequence[Any]:
        """Token ids of each review, with its end unless truncated."""
        self.check_context_length()
        tokenizer, reviews = self.learner.tokenizer, self.reviews[split]
        chats = [review.conversation for review in reviews if review.conversation is not None]
        if self.system_prompt is not None and not chats:
            raise ConfigurationError(f"needs conversations, but {self.source} has texts", key="system_prompt")
        # A template adds the special tokens itself
        texts = [chat.with_system(self.system_prompt).rendered("source", tokenizer) for chat in chats]
        encoded = encode(tokenizer, texts or [review.text for review in reviews], special_tokens=not chats)
        ends = end_tokens(tokenizer, self.learner.trained)
        return [ended(ids, tokenizer, ends)[: self.max_tokens] for ids in encoded]

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [B, N]."""
        return pad(examples, self.learner.tokenizer.pad_token_id, side="right")


@final
@dataclass(kw_only=True, eq=False, repr=False)
class LabelledReviewDataModule(WholeReviews):
    """Reviews with labels, for a classifier; reviews without a label are skipped."""

    contents = ("labelled reviews", "labelled reviews")

    def examples(self, split: str) -> list[Review]:
        """The labelled reviews."""
        self.check_context_length()
        labelled = [review for review in self.reviews[split] if review.label is not None]
        if not labelled:
            raise ConfigurationError(
                f"{self.source} has no labelled review in its {split} split; rows need a label, "
                "1 (positive) or 0 (negative)",
                key="source",
            )
        return labelled

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [B, N], and `labels`, [B]: 1 is positive."""
        texts = [review.text for review in examples]
        batch = classifier_batch(self.learner.tokenizer, texts, self.max_tokens)
        return {**batch, "labels": torch.tensor([int(review.label) for review in examples])}


@final
@dataclass(kw_only=True, eq=False, repr=False)
class TextPairDataModule(WholeTexts):
    """Pairs of a preferred and a rejected text, for a reward model.

    Args:
        source: "grammar" for pairs of reviews of the embedded world, a hub id, a folder, or a .parquet or
            .jsonl file with the columns chosen and rejected, and maybe prompt: texts or conversations.
        batch_size: Pairs per training batch.
        train_size: Number of training pairs; 0 for all.
        eval_size: Number of validation and of test pairs.
        eval_batch_size: Pairs per evaluation batch.
        max_tokens: Pairs with a longer text are left out, and those of equal texts.
        system_prompt: A system message for conversations without one, as in the training with this reward.
    """

    contents = ("pairs of texts", "pairs of texts")

    system_prompt: str | None = None

    def load(self, split: str) -> list[Preference | ChatPreference]:
        """The pairs of a split."""
        return load_pairs(self.source, split, size=self.sizes[split])

    def examples(self, split: str) -> list[TokenPair]:
        """Token ids of the chosen and the rejected text of each pair, see `usable_pairs`."""
        self.check_context_length()
        tokenizer, preferences = self.learner.tokenizer, self.reviews[split]
        whole = [whole_texts("source", pair, tokenizer, self.system_prompt) for pair in preferences]
        # A template adds the special tokens itself
        special = not any(isinstance(preference, ChatPreference) for preference in preferences)
        chosen, rejected = (
            tokenizer(list(texts), add_special_tokens=special)["input_ids"]
            for texts in zip(*whole, strict=True)
        )
        pairs = list(zip(chosen, rejected, strict=True))
        return usable_pairs(self.source, split, pairs, self.max_tokens)

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [2B, N]: all chosen texts, then all rejected ones."""
        chosen, rejected = zip(*examples, strict=True)
        return pad([*chosen, *rejected], self.learner.tokenizer.pad_token_id, side="right")


@dataclass(kw_only=True, eq=False, repr=False)
class ReviewBeginnings(CorpusDataModule, ABC):
    """Prompts: the first few tokens of reviews, or given prompts as they are.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            column prompt (texts or conversations, used as they are), messages (conversations, without the
            last answer) or text, of which the beginnings are used.
        batch_size: Prompts per training batch; the module sets the number of completions of each.
        train_size: Number of training prompts; 0 for one per review.
        eval_size: Number of prompts of the common evaluation, the same for every run.
        eval_batch_size: Prompts per evaluation batch; the sampled completions depend on it.
        min_prompt_tokens: Minimum length of a prompt.
        max_prompt_tokens: Maximum length of a prompt; each prompt's length is drawn from this range.
        system_prompt: A system message for conversations without one; texts in the column prompt become the
            user's message.
        teacher_system_prompt: The system message that the teacher, or the reference, reads in place of that
            of the policy; texts in the column prompt become the user's message for both. In the column
            teacher_prompt each row may have what it reads instead of the prompt, a text or a conversation.
        teacher_examples: Pairs of a question and an answer, which the teacher reads as earlier messages of
            the conversation.
    """

    columns = COLUMNS

    batch_size: int = 32
    train_size: int = 5_000
    eval_size: int = 256
    eval_batch_size: int = 64
    min_prompt_tokens: int = 2
    max_prompt_tokens: int = 8
    system_prompt: str | None = None
    teacher_system_prompt: str | None = None
    teacher_examples: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, min_prompt_tokens=self.min_prompt_tokens)
        check_at_least(self.min_prompt_tokens, max_prompt_tokens=self.max_prompt_tokens)

    def load(self, split: str) -> list[Review]:
        """The reviews or prompts of a split."""
        return load_reviews(self.source, split, size=self.sizes[split], columns=self.columns)

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts, which depend on the source, the system prompt and the tokenizer only.

        Raises:
            ConfigurationError: If a given prompt is too long for the policy, or a teacher's for the teacher.
        """
        learner = self.learner
        prompts = read_prompts(
            self.reviews[split],
            learner.tokenizer,
            min_tokens=self.min_prompt_tokens,
            max_tokens=self.max_prompt_tokens,
            system_prompt=self.system_prompt,
            teacher_system_prompt=self.teacher_system_prompt,
            teacher_examples=self.teacher_examples,
        )
        self._check_lengths("policy", split, [prompt.tokens for prompt in prompts if prompt.is_given])
        self._check_lengths("reference", split, [p.teacher for p in prompts if p.teacher is not None])
        return prompts

    def _check_lengths(self, name: str, split: str, prompts: Sequence[list[int]]) -> None:
        """Check that the longest prompt and a completion fit into the context of policy or reference."""
        learner, longest = self.learner, max(prompts, key=len, default=[])
        model = learner.trained if name == "policy" else getattr(learner, "reference", learner.trained)
        new = getattr(learner, "max_new_tokens", 1)
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if positions is not None and len(longest) + new > positions:
            kind = "prompt" if name == "policy" else "teacher's prompt"
            raise ConfigurationError(
                f"{self.source} has a {split} {kind} of {len(longest)} tokens; with max_new_tokens={new} it "
                f"exceeds the {name}'s context length, {positions}: leave out such prompts, or shorten them: "
                f"{learner.tokenizer.decode(longest[:12])!r}...",
                key="source",
            )


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PromptDataModule(ReviewBeginnings):
    """Prompts for training and evaluation."""

    contents = ("prompts", "prompts")

    def examples(self, split: str) -> list[Prompt]:
        """The prompts."""
        return self.prompts(split)

    def collate(self, split: str, examples: Sequence[Prompt]) -> Batch:
        """See `prompt_batch`."""
        return prompt_batch(examples, self.learner.tokenizer.pad_token_id)


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceDataModule(ReviewBeginnings):
    """Preference pairs for training, prompts for evaluation.

    The module that is trained makes the pairs from the training prompts (see `DPOModule.preference_pairs`)
    unless `preferences` is given.

    Args:
        batch_size: Pairs per training batch.
        preferences: A data set of preferences, of which the first train_size are used: a hub id, a folder, or
            a .parquet or .jsonl file with the columns prompt, chosen and rejected: texts or conversations.
    """

    contents = ("preferences", "prompts")

    preferences: str | None = None

    def examples(self, split: str) -> Sequence[Any]:
        """Pairs for the train split, prompts for the others."""
        if split != "train":
            return self._shared_prompts(split)
        learner = self.learner
        if not isinstance(learner, PairMaker):
            raise ConfigurationError(
                "PreferenceDataModule needs a module that makes preference pairs, such as DPOModule, "
                f"got {type(learner).__name__}"
            )
        if self.preferences is None:
            return learner.preference_pairs(self._shared_prompts(split))
        preferences = load_preferences(self.preferences)[: self.train_size or None]
        tokenizer, ends = learner.tokenizer, end_tokens(learner.tokenizer, learner.trained)
        pairs = as_tokens("preferences", preferences, tokenizer, ends, self.system_prompt)
        return learner.given_pairs(pairs)

    def _shared_prompts(self, split: str) -> list[Prompt]:
        """The prompts, which the reference of preferences reads as the policy does.

        Raises:
            ConfigurationError: If it has other prompts.
        """
        prompts = self.prompts(split)
        if any(prompt.teacher is not None for prompt in prompts):
            raise ConfigurationError(
                f"{self.source} gives the reference prompts of its own, which preferences do not support: "
                "leave out teacher_system_prompt, teacher_examples and the column teacher_prompt",
                key="source",
            )
        return prompts

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """`collate_pairs` for the train split, `prompt_batch` for the others."""
        pad_token_id = self.learner.tokenizer.pad_token_id
        return (
            collate_pairs(examples, pad_token_id)
            if split == "train"
            else prompt_batch(examples, pad_token_id)
        )
