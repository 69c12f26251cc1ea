"""Prompts: the first few tokens of reviews, or given prompts as they are."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.grammar import Review
from lit_klrb.seeding import derive_seed


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        tokens: Its token ids.
        columns: The other columns of its row, for rewards.
    """

    tokens: list[int]
    columns: Mapping[str, Any]


def cut_prompts(
    reviews: Sequence[Review],
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int,
    max_tokens: int,
    seed: int = 0,
) -> list[list[int]]:
    """Cut each review to a prompt whose length is uniform between `min_tokens` and `max_tokens`.

    Given prompts (`Review.is_prompt`) are not cut.

    Args:
        reviews: The reviews.
        tokenizer: The tokenizer; no special tokens are added.
        min_tokens: Minimum length; a shorter review is a prompt as a whole.
        max_tokens: Maximum length.
        seed: Seed of the lengths; the length of prompt i depends on (seed, i) only.

    Returns:
        Token ids of each prompt.

    Example:
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> review = Review("What a marvelous thriller! The acting was superb. Do not miss it!", label=1)
        >>> prompts = cut_prompts([review] * 3, grammar_tokenizer(), min_tokens=2, max_tokens=8)
        >>> [len(prompt) for prompt in prompts]
        [5, 3, 4]
    """
    encoded = tokenizer([review.text for review in reviews], add_special_tokens=False)["input_ids"]
    return [
        ids if review.is_prompt else ids[: _length(seed, index, min_tokens, max_tokens)]
        for index, (review, ids) in enumerate(zip(reviews, encoded, strict=True))
    ]


def _length(seed: int, index: int, least: int, most: int) -> int:
    return random.Random(derive_seed(seed, "prompt length", index)).randint(least, most)
