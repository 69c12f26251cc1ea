"""Prompts are beginnings of reviews, whose lengths depend on the seed and the index only."""

from collections import Counter

import pytest

from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row
from lit_klrb.data.prompts import read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.data.tokenizer import grammar_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return grammar_tokenizer()


@pytest.fixture(scope="module")
def reviews():
    return [Row(None, (review.text,)) for review in ReviewGrammar().reviews(700, seed=1)]


def starts_of(rows, tokenizer, least, most):
    return [prompt.tokens for prompt in read_prompts(rows, Reader("key", tokenizer, ()), least, most)]


def test_prompts_are_the_first_tokens_of_their_reviews(reviews, tokenizer):
    prompts = starts_of(reviews, tokenizer, 2, 8)
    for prompt, review in zip(prompts, reviews, strict=True):
        assert tokenizer(review.text)["input_ids"][: len(prompt)] == prompt


def test_lengths_are_uniform_over_the_range(reviews, tokenizer):
    counts = Counter(len(prompt) for prompt in starts_of(reviews, tokenizer, 2, 8))
    assert set(counts) == set(range(2, 9))
    assert all(abs(count - 100) < 40 for count in counts.values())  # four standard deviations


def test_prompts_are_addressed(reviews, tokenizer):
    prompts = starts_of(reviews, tokenizer, 2, 8)
    assert starts_of(reviews[:10], tokenizer, 2, 8) == prompts[:10]


def test_a_short_review_is_a_prompt_as_a_whole(tokenizer):
    assert starts_of([Row(None, ("The cast.",))], tokenizer, 5, 5) == [tokenizer("The cast.")["input_ids"]]
