"""LightningDataModules: reviews as language-model batches, as prompts and as preference pairs."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from lit_klrb.data.base import CorpusDataModule
from lit_klrb.data.batches import Batch, classifier_batch, pad
from lit_klrb.data.corpora import GRAMMAR, PROMPT, TEXT
from lit_klrb.data.grammar import Review, ReviewGrammar
from lit_klrb.data.interfaces import PairMaker
from lit_klrb.data.preferences import collate_pairs, load_preferences
from lit_klrb.data.prompts import Prompt, cut_prompts
from lit_klrb.errors import ConfigurationError, check_at_least


@dataclass(kw_only=True, eq=False, repr=False)
class WholeReviews(CorpusDataModule, ABC):
    """Complete reviews, truncated to a maximum number of tokens.

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
        """Check that reviews fit into the model's context.

        Raises:
            ConfigurationError: If `max_tokens` exceeds the model's context length.
        """
        positions = getattr(self.learner.trained.config, "max_position_embeddings", None)
        if positions is not None and self.max_tokens > positions:
            raise ConfigurationError(
                f"{self.max_tokens} exceeds the model's context length, {positions}", key="max_tokens"
            )


@final
@dataclass(kw_only=True, eq=False, repr=False)
class ReviewDataModule(WholeReviews):
    """Reviews with an end-of-sequence token, for language modelling."""

    contents = ("reviews", "reviews")

    def entropy_per_token(self) -> float | None:
        """The lowest cross-entropy that any model can reach, in nats per token; None if it is unknown."""
        # Without a beginning-of-sequence token the first token is not predicted
        return ReviewGrammar().entropy(given=1).per_token if self.source == GRAMMAR else None

    def examples(self, split: str) -> Sequence[Any]:
        """Token ids of each review, with EOS unless truncated."""
        self.check_context_length()
        tokenizer = self.learner.tokenizer
        encoded = tokenizer([review.text for review in self.reviews[split]])
        return [[*ids, tokenizer.eos_token_id][: self.max_tokens] for ids in encoded["input_ids"]]

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
                f"{self.source} has no labelled review in its {split} split", key="source"
            )
        return labelled

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [B, N], and `labels`, [B]: 1 is positive."""
        texts = [review.text for review in examples]
        batch = classifier_batch(self.learner.tokenizer, texts, self.max_tokens)
        return {**batch, "labels": torch.tensor([int(review.label) for review in examples])}


@dataclass(kw_only=True, eq=False, repr=False)
class ReviewBeginnings(CorpusDataModule, ABC):
    """Prompts: the first few tokens of reviews, or given prompts as they are.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            column prompt, whose texts are used as they are, or text, of which the beginnings are used.
        batch_size: Prompts per training batch; the module sets the number of completions of each.
        train_size: Number of training prompts; 0 for one per review.
        eval_size: Number of prompts of the common evaluation, the same for every run.
        eval_batch_size: Prompts per evaluation batch; the sampled completions depend on it.
        min_prompt_tokens: Minimum length of a prompt.
        max_prompt_tokens: Maximum length of a prompt; each prompt's length is drawn from this range.
    """

    columns = (PROMPT, TEXT)

    batch_size: int = 32
    train_size: int = 5_000
    eval_size: int = 256
    eval_batch_size: int = 64
    min_prompt_tokens: int = 2
    max_prompt_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, min_prompt_tokens=self.min_prompt_tokens)
        check_at_least(self.min_prompt_tokens, max_prompt_tokens=self.max_prompt_tokens)

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts, which depend on the source and the tokenizer only."""
        reviews = self.reviews[split]
        tokens = cut_prompts(
            reviews,
            self.learner.tokenizer,
            min_tokens=self.min_prompt_tokens,
            max_tokens=self.max_prompt_tokens,
        )
        return [Prompt(ids, review.columns) for ids, review in zip(tokens, reviews, strict=True)]

    def pad_prompts(self, prompts: Sequence[Prompt]) -> Batch:
        """Left-padded `tokens` and `attention_mask`, [P, N], and `rows` if there are other columns."""
        rows = [dict(prompt.columns) for prompt in prompts]
        tokens = [prompt.tokens for prompt in prompts]
        batch = pad(tokens, self.learner.tokenizer.pad_token_id, side="left")
        return {**batch, "rows": rows} if any(rows) else batch


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PromptDataModule(ReviewBeginnings):
    """Prompts for training and evaluation."""

    contents = ("prompts", "prompts")

    def examples(self, split: str) -> list[Prompt]:
        """The prompts."""
        return self.prompts(split)

    def collate(self, split: str, examples: Sequence[Prompt]) -> Batch:
        """See `pad_prompts`."""
        return self.pad_prompts(examples)


@final
@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceDataModule(ReviewBeginnings):
    """Preference pairs for training, prompts for evaluation.

    The module that is trained makes the pairs from the training prompts (see `DPOModule.preference_pairs`)
    unless `preferences` is given.

    Args:
        batch_size: Pairs per training batch.
        preferences: A data set of preferences, of which the first train_size are used: a hub id, a folder, or
            a .parquet or .jsonl file with the columns prompt, chosen and rejected.
    """

    contents = ("preferences", "prompts")

    preferences: str | None = None

    def examples(self, split: str) -> Sequence[Any]:
        """Pairs for the train split, prompts for the others."""
        if split != "train":
            return self.prompts(split)
        if self.preferences is None:
            return self.pair_maker.preference_pairs(self.prompts(split))
        return self.pair_maker.given_pairs(load_preferences(self.preferences)[: self.train_size or None])

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """`collate_pairs` for the train split, `pad_prompts` for the others."""
        if split == "train":
            return collate_pairs(examples, self.learner.tokenizer.pad_token_id)
        return self.pad_prompts(examples)

    @property
    def pair_maker(self) -> PairMaker:
        """The module that is trained.

        Raises:
            ConfigurationError: If it does not make preference pairs.
        """
        module = self.learner
        if not isinstance(module, PairMaker):
            raise ConfigurationError(
                "PreferenceDataModule needs a module that makes preference pairs, such as DPOModule, "
                f"got {type(module).__name__}"
            )
        return module
