"""Pairs of a preferred and a rejected text, for reward models."""

import hashlib
import logging
import math
import random
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

from lit_klrb.data.corpora import GRAMMAR, hold_out, open_splits, pick
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.preferences import ChatPreference, Preference, parse_preferences
from lit_klrb.errors import ConfigurationError
from lit_klrb.seeding import derive_seed

TokenPair = tuple[list[int], list[int]]
log = logging.getLogger(__name__)


def load_pairs(
    source: str = GRAMMAR, split: str = "train", size: int = 0
) -> list[Preference | ChatPreference]:
    """Load the pairs of a split, shuffled.

    Splits are those of `load_reviews`, by the prompt: pairs of one prompt are in one split. Pairs of the
    embedded world follow the Bradley-Terry model: of two reviews, the first is preferred with probability
    sigmoid(a - b), where a and b are their clipped log odds of being positive.

    Args:
        source: "grammar" for the embedded world, a hub id, a folder, or a .parquet or .jsonl file with the
            columns chosen and rejected, and maybe prompt; see `load_preferences`. Texts need no prompt.
        split: "train", "validation", "test", or another split of the source.
        size: Maximum number of pairs; 0 for all.

    Raises:
        ConfigurationError: If the source or split does not exist, a row is not a pair, or `size` is 0 for the
            grammar, whose pairs are unlimited.

    Example:
        >>> load_pairs("grammar", "test", size=2) == load_pairs("grammar", "test", size=3)[:2]
        True
    """
    if source != GRAMMAR:
        return pick(source, _pair_splits(source), split, size)
    if not size:
        raise ConfigurationError(
            f"{source} is unlimited: a size of 0 (all pairs) is allowed for other sources", key="source"
        )
    grammar = ReviewGrammar()
    texts = [review.text for review in grammar.reviews(2 * size, derive_seed(0, "pairs", split))]
    pairs: list[Preference | ChatPreference] = []
    for number in range(size):
        first, second = texts[2 * number : 2 * number + 2]
        odds = grammar.clipped_log_odds(first) - grammar.clipped_log_odds(second)
        draw = random.Random(derive_seed(0, "preferred", split, number)).random()
        first_is_better = draw < 1 / (1 + math.exp(-odds))
        pairs.append(Preference("", *((first, second) if first_is_better else (second, first))))
    return pairs


def whole_texts(
    key: str,
    pair: Preference | ChatPreference,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None = None,
) -> tuple[str, str]:
    """The chosen and the rejected text, each with its prompt.

    Args:
        key: The argument that names their source, for the error message.
        pair: The pair.
        tokenizer: The reward model's, whose chat template makes texts of conversations.
        system_prompt: A system message for conversations without one.

    Raises:
        ConfigurationError: If it has no chat template, the template refuses a conversation, or there is a
            system prompt for texts.
    """
    if isinstance(pair, ChatPreference):
        chosen, rejected = (chat.with_system(system_prompt).text(key, tokenizer) for chat in pair)
        return chosen, rejected
    if system_prompt is not None:
        raise ConfigurationError("needs conversations, but the pairs are texts", key="system_prompt")
    return pair.prompt + pair.chosen, pair.prompt + pair.rejected


def usable_pairs(source: str, split: str, pairs: Sequence[TokenPair], max_tokens: int) -> list[TokenPair]:
    """The pairs from which a reward can be learned; the number of the others is logged.

    Args:
        source: The source, for the log and the error message.
        split: Its split.
        pairs: Token ids of the chosen and the rejected text.
        max_tokens: Pairs with a longer text are left out, as cutting them could remove what differs.

    Raises:
        ConfigurationError: If all texts are equal within their pair, or all pairs are too long.
    """
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if not different:
        raise ConfigurationError(
            f"{source} has the same chosen and rejected text in every {split} pair", key="source"
        )
    kept = [pair for pair in different if max(map(len, pair)) <= max_tokens]
    if not kept:
        shortest = min(max(map(len, pair)) for pair in different)
        raise ConfigurationError(
            f"{max_tokens} is less than the {shortest} tokens of the shortest {split} pair of {source}",
            key="max_tokens",
        )
    for count, reason in (
        (len(pairs) - len(different), "of equal texts"),
        (len(different) - len(kept), f"with more than max_tokens={max_tokens} tokens"),
    ):
        if count:
            log.warning("%s: left out %d of %d %s pairs %s", source, count, len(pairs), split, reason)
    return kept


@cache
def _pair_splits(source: str) -> dict[str, list[Preference | ChatPreference]]:
    opened = open_splits("source", source)
    splits = {
        name: parse_preferences(
            "source", source if len(opened) == 1 else f"{source}: {name}", rows, needs_prompt=False
        )
        for name, rows in opened.items()
        if len(rows)
    }
    return hold_out(source, splits, _identity)


def _identity(pair: Preference | ChatPreference) -> str:
    """What pairs of the same prompt have in common; a text without a prompt is on its own."""
    if isinstance(pair, ChatPreference):
        return pair.chosen.identity(slice(-1))
    # Its CRC-32 decides the split, and is far from uniform over short texts that differ in a digit
    return hashlib.sha256((pair.prompt or pair.chosen).encode()).hexdigest()
