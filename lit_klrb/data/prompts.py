"""Prompts: the first few tokens of reviews, or given prompts and conversations as they are."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import USER, Conversation, shown
from lit_klrb.data.corpora import MESSAGES, PROMPT, TEXT
from lit_klrb.data.grammar import Review
from lit_klrb.errors import ConfigurationError
from lit_klrb.seeding import derive_seed

# Names of the column with the prompts, of which the first that exists is read.
COLUMNS = (PROMPT, MESSAGES, TEXT)


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        tokens: Its token ids.
        columns: The other columns of its row, for rewards. Those of a conversation have its messages under
            `prompt`.
        is_given: Whether it is used as a whole.
    """

    tokens: list[int]
    columns: Mapping[str, Any]
    is_given: bool = False


def read_prompts(
    reviews: Sequence[Review],
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int,
    max_tokens: int,
    system_prompt: str | None = None,
) -> list[Prompt]:
    """Prompts from reviews, given prompts or conversations.

    The tokenizer's chat template makes the text of a conversation, special tokens included; an answer at the
    end of a whole conversation (the column `messages`) is left out.

    Args:
        reviews: The reviews.
        tokenizer: The policy's tokenizer.
        min_tokens: See `cut_prompts`.
        max_tokens: See `cut_prompts`.
        system_prompt: A system message for conversations without one; given texts become the user's message.

    Raises:
        ConfigurationError: If there is a system prompt for reviews, or the template refuses a conversation.
    """
    texts = [_as_text(review, tokenizer, system_prompt) for review in reviews]
    tokens = cut_prompts(texts, tokenizer, min_tokens, max_tokens)
    return [Prompt(ids, text.columns, text.is_prompt) for ids, text in zip(tokens, texts, strict=True)]


def prompt_batch(prompts: Sequence[Prompt], pad_token_id: int) -> Batch:
    """Left-padded `tokens` and `attention_mask`, [P, N], and `rows` if there are other columns.

    Args:
        prompts: P prompts.
        pad_token_id: The padding token.
    """
    rows = [dict(prompt.columns) for prompt in prompts]
    batch = pad([prompt.tokens for prompt in prompts], pad_token_id, side="left")
    return {**batch, "rows": rows} if any(rows) else batch


def _as_text(review: Review, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> Review:
    conversation = review.conversation
    if conversation is None:
        if system_prompt is None:
            return review
        if not review.is_prompt:
            raise ConfigurationError(
                "needs conversations or texts in the column prompt; the prompts are the beginnings of texts",
                key="system_prompt",
            )
        user = {"role": USER, "content": review.text}
        conversation = Conversation((user,), f"the prompt {shown(review.text)} with a system prompt")
    elif not review.is_prompt:
        conversation = conversation.before_answer("source")
    conversation = conversation.with_system(system_prompt)
    columns = {**review.columns, PROMPT: list(conversation.messages)}
    text = conversation.prompt("source", tokenizer)
    return replace(review, text=text, is_prompt=True, columns=columns, conversation=None)


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
