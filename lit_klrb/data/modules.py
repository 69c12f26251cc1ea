"""LightningDataModules: reviews as language-model batches, as prompts, as preference pairs.

The tokenizer belongs to the policy, so it is asked of the module the trainer runs. Every training batch is
a function of (seed, step): a resumed run reads the batches it would have read.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lit_klrb.data.batches import Batch, classifier_batch, pad
from lit_klrb.data.corpora import GRAMMAR, load_reviews
from lit_klrb.data.grammar import Review, ReviewGrammar
from lit_klrb.data.preferences import collate_pairs, load_preferences
from lit_klrb.data.prompts import cut_prompts
from lit_klrb.data.samplers import StepBatchSampler
from lit_klrb.errors import ConfigurationError

SPLITS = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


class CorpusDataModule(L.LightningDataModule, ABC):
    """A corpus of reviews behind endless training batches and finite evaluation batches."""

    def __init__(
        self, source: str, batch_size: int, train_size: int, eval_size: int, eval_batch_size: int, seed: int
    ) -> None:
        super().__init__()
        _check("batch_size", batch_size, at_least=1)
        _check("eval_batch_size", eval_batch_size, at_least=1)
        _check("train_size", train_size, at_least=0)
        _check("eval_size", eval_size, at_least=1)
        self.source, self.seed = source, seed
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.sizes = {"train": train_size, "validation": eval_size, "test": eval_size}
        self.reviews: dict[str, Sequence[Review]] = {}

    @abstractmethod
    def examples(self, split: str) -> Sequence[Any]:
        """What the split's batches are made of."""

    @abstractmethod
    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """One batch of the split's examples."""

    def setup(self, stage: str) -> None:
        """Load the splits the stage reads."""
        for split in SPLITS[stage]:
            self.reviews[split] = load_reviews(self.source, split, size=self.sizes[split])

    def train_dataloader(self) -> DataLoader[Any]:
        """Endless batches, from the batch the run stands at."""
        assert self.trainer is not None
        examples: Any = self.examples("train")
        done = self.trainer.global_step * self.trainer.accumulate_grad_batches
        repeat = self.module.steps_per_batch
        sampler = StepBatchSampler(
            len(examples),
            self.batch_size,
            self.seed,
            start=done,
            repeat=repeat,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        return DataLoader(examples, batch_sampler=sampler, collate_fn=partial(self.collate, "train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation split, in order."""
        return self._eval_loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """The test split, in order."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test split, in order."""
        return self._eval_loader("test")

    def _eval_loader(self, split: str) -> DataLoader[Any]:
        examples: Any = self.examples(split)
        return DataLoader(examples, batch_size=self.eval_batch_size, collate_fn=partial(self.collate, split))

    @property
    def module(self) -> Any:
        """The module the trainer runs."""
        assert self.trainer is not None
        return self.trainer.lightning_module


class ReviewDataModule(CorpusDataModule):
    """Whole reviews, end-of-sequence token appended, for language modelling.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            columns text and label.
        batch_size: Reviews a batch.
        train_size: Reviews to train on; 0 takes all there are.
        eval_size: Reviews to validate and to test on.
        eval_batch_size: Reviews a batch there.
        max_tokens: Tokens after which a review is cut off.
        seed: Decides the order of the training data; set by --seed_everything.
    """

    def __init__(
        self,
        source: str = "grammar",
        batch_size: int = 64,
        train_size: int = 20_000,
        eval_size: int = 512,
        eval_batch_size: int = 64,
        max_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(source, batch_size, train_size, eval_size, eval_batch_size, seed)
        _check("max_tokens", max_tokens, at_least=2)
        self.max_tokens = max_tokens

    @property
    def entropy_per_token(self) -> float | None:
        """The smallest cross-entropy any model can reach, in nats a token, where the source knows it."""
        # The first token is read, not predicted: there is no beginning-of-sequence token.
        return ReviewGrammar().entropy(given=1).per_token if self.source == GRAMMAR else None

    def check_positions(self, model: PreTrainedModel) -> None:
        """Refuse reviews longer than a model can read.

        Raises:
            ConfigurationError: Naming the two numbers.
        """
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and self.max_tokens > positions:
            raise ConfigurationError(
                f"{self.max_tokens} exceeds the model's context length, {positions}", key="max_tokens"
            )

    def examples(self, split: str) -> Sequence[Any]:
        """Token ids of each review, ending with EOS where it fits."""
        self.check_positions(self.module.policy)
        tokenizer = self.module.tokenizer
        encoded = tokenizer([review.text for review in self.reviews[split]])
        return [[*ids, tokenizer.eos_token_id][: self.max_tokens] for ids in encoded["input_ids"]]

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [B, N]."""
        return pad(examples, self.module.tokenizer.pad_token_id, side="right")


class LabelledReviewDataModule(ReviewDataModule):
    """Reviews with their labels, for a classifier; those without a label are left out.

    The arguments are those of `ReviewDataModule`.
    """

    def examples(self, split: str) -> list[Review]:
        """The labelled reviews."""
        self.check_positions(self.module.classifier)
        labelled = [review for review in self.reviews[split] if review.label is not None]
        if not labelled:
            raise ConfigurationError(
                f"{self.source} has no labelled review in its {split} split", key="source"
            )
        return labelled

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """Right-padded `tokens` and `attention_mask`, [B, N], and `labels`, [B]: 1 is positive."""
        batch = classifier_batch(self.module.tokenizer, [review.text for review in examples], self.max_tokens)
        return {**batch, "labels": torch.tensor([int(review.label) for review in examples])}


class PromptDataModule(CorpusDataModule):
    """The first few tokens of reviews, as prompts for completions.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            column text.
        batch_size: Prompts a batch; each gets sampling.completions_per_prompt completions.
        train_size: Prompts to train on; 0 takes one of every review there is.
        eval_size: Prompts of the common evaluation, the same for every run.
        eval_batch_size: Prompts a batch there; it decides which completions are drawn.
        min_prompt_tokens: Shortest prompt.
        max_prompt_tokens: Longest prompt; each prompt's length is drawn between the two.
        seed: Decides the order of the training prompts; set by --seed_everything.
    """

    def __init__(
        self,
        source: str = "grammar",
        batch_size: int = 32,
        train_size: int = 5_000,
        eval_size: int = 256,
        eval_batch_size: int = 64,
        min_prompt_tokens: int = 2,
        max_prompt_tokens: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(source, batch_size, train_size, eval_size, eval_batch_size, seed)
        _check("min_prompt_tokens", min_prompt_tokens, at_least=1)
        _check("max_prompt_tokens", max_prompt_tokens, at_least=min_prompt_tokens)
        self.prompt_tokens = (min_prompt_tokens, max_prompt_tokens)

    def examples(self, split: str) -> Sequence[Any]:
        """Token ids of each prompt; the same in every run with this source and tokenizer."""
        return cut_prompts(self.reviews[split], self.module.tokenizer, *self.prompt_tokens)

    def collate(self, split: str, examples: Sequence[list[int]]) -> Batch:
        """Left-padded `tokens` and `attention_mask`, [P, N]."""
        return pad(examples, self.module.tokenizer.pad_token_id, side="left")


class PreferenceDataModule(PromptDataModule):
    """Preference pairs to train on, prompts to evaluate on.

    The module that is trained makes the pairs, from the training prompts (see
    `DPOModule.preference_pairs`), unless they are given.

    Args:
        preferences: A data set whose first train_size pairs to train on: a hub id, a folder, or a .parquet or
            .jsonl file with the columns prompt, chosen and rejected.
        kwargs: See `PromptDataModule`; batch_size counts pairs.
    """

    def __init__(self, preferences: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.preferences = preferences

    def examples(self, split: str) -> Sequence[Any]:
        """Pairs for training; prompts otherwise."""
        if split == "train" and self.preferences is not None:
            return self.module.given_pairs(load_preferences(self.preferences)[: self.sizes["train"] or None])
        prompts = super().examples(split)
        return self.module.preference_pairs(prompts) if split == "train" else prompts

    def collate(self, split: str, examples: Sequence[Any]) -> Batch:
        """See `collate_pairs` for training batches, `PromptDataModule.collate` for the others."""
        if split == "train":
            return collate_pairs(examples, self.module.tokenizer.pad_token_id)
        return super().collate(split, examples)


def _check(name: str, value: int, at_least: int) -> None:
    if value < at_least:
        raise ConfigurationError(f"must be at least {at_least}, got {value}", key=name)
