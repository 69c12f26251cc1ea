"""Prompts: the first few tokens of reviews, or given prompts and conversations as they are."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.chat import USER, Conversation, is_messages, is_unicode, shown
from lit_klrb.data.corpora import MESSAGES, PROMPT, TEACHER_PROMPT, TEXT
from lit_klrb.data.encoding import beginning, encode
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
        teacher: Token ids of what the teacher, or the reference, reads instead; None for the same.
    """

    tokens: list[int]
    columns: Mapping[str, Any]
    is_given: bool = False
    teacher: list[int] | None = None


def read_prompts(
    reviews: Sequence[Review],
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int,
    max_tokens: int,
    system_prompt: str | None = None,
    teacher_system_prompt: str | None = None,
    teacher_examples: Sequence[tuple[str, str]] = (),
    key: str = "source",
) -> list[Prompt]:
    """Prompts from reviews, given prompts or conversations.

    The tokenizer's chat template makes the text of a conversation, special tokens included; an answer at the
    end of a whole conversation (the column `messages`) is left out.

    The teacher reads its entry of the column `teacher_prompt` instead, a text or a conversation, or else the
    prompt's conversation with its own system message; examples come before both.

    Args:
        reviews: The reviews.
        tokenizer: The policy's tokenizer.
        min_tokens: See `cut_prompts`.
        max_tokens: See `cut_prompts`.
        system_prompt: A system message for conversations without one; given texts become the user's message.
        teacher_system_prompt: The teacher's system message, in place of any other.
        teacher_examples: Questions with answers, which only the teacher reads.
        key: The argument that names their source, for error messages.

    Raises:
        ConfigurationError: If there is a system prompt or a teacher's prompt for reviews, or the template
            refuses a conversation.
    """
    messages = {"system_prompt": system_prompt, "teacher_system_prompt": teacher_system_prompt}
    named = [name for name, text in messages.items() if text is not None]
    named += ["teacher_examples"] if teacher_examples else []
    # All are of the same kind
    as_chats = named or any(is_messages(review.columns.get(TEACHER_PROMPT)) for review in reviews)
    asked = [*named, key][0] if as_chats else None
    pairs = [(review, _conversation(key, review, asked)) for review in reviews]
    texts = [_as_text(key, review, chat, tokenizer, system_prompt) for review, chat in pairs]
    systems = system_prompt, teacher_system_prompt
    read = [
        _teachers_text(key, review, chat, tokenizer, teacher_examples, *systems) for review, chat in pairs
    ]
    tokens = cut_prompts(texts, tokenizer, min_tokens, max_tokens)
    teacher: Sequence[list[int] | None] = [None] * len(texts)
    if any(text is not None for text in read):
        own = [other if text is None else text for text, other in zip(read, texts, strict=True)]
        teacher = cut_prompts(own, tokenizer, min_tokens, max_tokens)
    return [
        Prompt(ids, text.columns, text.is_prompt, others)
        for ids, text, others in zip(tokens, texts, teacher, strict=True)
    ]


def prompt_batch(prompts: Sequence[Prompt], pad_token_id: int) -> Batch:
    """Left-padded `tokens` and `attention_mask`, [P, N], and `rows` if there are other columns.

    A teacher that reads other prompts has them as `teacher_tokens` and `teacher_attention_mask`, [P, M].

    Args:
        prompts: P prompts.
        pad_token_id: The padding token.
    """
    rows = [dict(prompt.columns) for prompt in prompts]
    batch = pad([prompt.tokens for prompt in prompts], pad_token_id, side="left")
    teacher = [prompt.teacher for prompt in prompts if prompt.teacher is not None]
    if teacher:  # all have one, or none
        padded = pad(teacher, pad_token_id, side="left")
        batch |= {f"teacher_{name}": tensor for name, tensor in padded.items()}
    return {**batch, "rows": rows} if any(rows) else batch


def _conversation(key: str, review: Review, asked: str | None) -> Conversation | None:
    """The messages before the answer, without a system prompt; None for a text that is read as it is.

    Args:
        key: The argument that names the source.
        review: The review.
        asked: The argument that asks for conversations; None if texts are read as they are.
    """
    if review.conversation is not None:
        return review.conversation if review.is_prompt else review.conversation.before_answer(key)
    if asked is None:
        return None
    if not review.is_prompt:
        raise ConfigurationError(
            "needs conversations or texts in the column prompt; the prompts are the beginnings of texts",
            key=asked,
        )
    user = {"role": USER, "content": review.text}
    return Conversation((user,), f"the prompt {shown(review.text)} with a system prompt")


def _as_text(
    key: str,
    review: Review,
    conversation: Conversation | None,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
) -> Review:
    if conversation is None:
        return review
    conversation = conversation.with_system(system_prompt)
    columns = {**review.columns, PROMPT: list(conversation.messages)}
    text = conversation.prompt(key, tokenizer)
    return replace(review, text=text, is_prompt=True, columns=columns, conversation=conversation)


def _teachers_text(
    key: str,
    review: Review,
    conversation: Conversation | None,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[tuple[str, str]],
    system_prompt: str | None,
    teacher_system_prompt: str | None,
) -> Review | None:
    """What the teacher reads; None for the same as the student."""
    given = review.columns.get(TEACHER_PROMPT)
    system = system_prompt if teacher_system_prompt is None else teacher_system_prompt
    instead = False
    if given is None:
        instead = teacher_system_prompt is not None
        if conversation is None or not (instead or examples):
            return None
    else:
        if conversation is None and not review.is_prompt:
            raise ConfigurationError(
                f"the column {TEACHER_PROMPT} needs conversations or texts in the column prompt; the prompts "
                "are the beginnings of texts",
                key=key,
            )
        place = f"the {TEACHER_PROMPT} of {shown(review.text)}"
        if isinstance(given, str) and not (given and is_unicode(given)):
            raise ConfigurationError(f"{place} is {shown(given)}; Unicode characters are expected", key=key)
        if isinstance(given, str) and conversation is None:
            return replace(review, text=given)
        messages = [{"role": USER, "content": given}] if isinstance(given, str) else given
        conversation = Conversation.read(key, place, messages)
    conversation = conversation.with_system(system, instead=instead).with_examples(examples)
    text = conversation.prompt(key, tokenizer)
    return replace(review, text=text, is_prompt=True, conversation=conversation)


def cut_prompts(
    reviews: Sequence[Review],
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int,
    max_tokens: int,
) -> list[list[int]]:
    """Cut each review to a prompt whose length is uniform between `min_tokens` and `max_tokens`.

    Given prompts (`Review.is_prompt`) are not cut. What the tokenizer puts before a text, such as a BOS, does
    not count, and is not added to conversations, which have it from the chat template.

    Args:
        reviews: The reviews.
        tokenizer: The tokenizer.
        min_tokens: Minimum length; a shorter review is a prompt as a whole.
        max_tokens: Maximum length; the length of prompt i depends on i only.

    Returns:
        Token ids of each prompt.

    Example:
        >>> from lit_klrb.data.tokenizer import grammar_tokenizer
        >>> review = Review("What a marvelous thriller! The acting was superb. Do not miss it!", label=1)
        >>> prompts = cut_prompts([review] * 3, grammar_tokenizer(), min_tokens=2, max_tokens=8)
        >>> [len(prompt) for prompt in prompts]
        [5, 3, 4]
    """
    chats = any(review.conversation is not None for review in reviews)
    encoded = encode(tokenizer, [review.text for review in reviews], special_tokens=not chats)
    added = len(beginning(tokenizer))
    return [
        ids if review.is_prompt else ids[: added + _length(index, min_tokens, max_tokens)]
        for index, (review, ids) in enumerate(zip(reviews, encoded, strict=True))
    ]


def _length(index: int, least: int, most: int) -> int:
    return random.Random(derive_seed(0, "prompt length", index)).randint(least, most)
