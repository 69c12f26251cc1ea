"""Pairs of a chosen and a rejected answer: those of the embedded world, and their batches."""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.encode import Encoded, LeftOutError
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.kinds import Row
from lit_klrb.seeding import derive_seed


def grammar_pairs(split: str, size: int) -> list[Row]:
    """Pairs of reviews of the embedded world, which follow the Bradley-Terry model.

    Of two reviews, the first is preferred with probability sigmoid(a - b), where a and b are their clipped
    log odds of being positive.

    Example:
        >>> grammar_pairs("test", size=2) == grammar_pairs("test", size=3)[:2]
        True
    """
    grammar = ReviewGrammar()
    texts = [review.text for review in grammar.reviews(2 * size, derive_seed(0, "pairs", split))]
    pairs = []
    for number, (first, second) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        odds = grammar.clipped_log_odds(first) - grammar.clipped_log_odds(second)
        draw = random.Random(derive_seed(0, "preferred", split, number)).random()
        first_is_better = draw < 1 / (1 + math.exp(-odds))
        pairs.append(Row("", (first, second) if first_is_better else (second, first)))
    return pairs


def differing(chosen: list[int], rejected: list[int]) -> tuple[list[int], list[int]]:
    """Token ids of two answers; if they do not differ, the row is left out."""
    if chosen == rejected:
        raise LeftOutError("chosen equals rejected")
    return chosen, rejected


class PreferencePair(NamedTuple):
    """Token ids of a prompt and two completions, and the log-probability of each under the reference."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_ref_logprob: float = 0.0
    rejected_ref_logprob: float = 0.0

    @classmethod
    def of(cls, chosen: Encoded, rejected: Encoded) -> "PreferencePair":
        """Of two answers to a prompt, which is what both have before the first token of an answer."""
        one, other = differing(chosen.ids, rejected.ids)
        most = min(chosen.start, rejected.start)
        start = next((n for n in range(most) if one[n] != other[n]), most)
        if not start:
            raise LeftOutError("an empty prompt")
        return cls(one[:start], one[start:], other[start:])


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> Batch:
    """Collate B pairs into 2B sequences: all chosen completions, then all rejected ones.

    Returns:
        `tokens` and `attention_mask` [2B, P+T], `mask` [2B, T] and `ref_logprob` [2B].

    Example:
        >>> batch = collate_pairs([PreferencePair([5], [6, 7], [8], -1.0, -2.0)], pad_token_id=0)
        >>> batch["tokens"].tolist()
        [[5, 6, 7], [5, 8, 0]]
    """
    prompts = pad([pair.prompt for pair in pairs] * 2, pad_token_id, side="left")
    completions = pad(
        [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_token_id, side="right"
    )
    joined: dict[str, Tensor] = {key: torch.cat([prompts[key], completions[key]], 1) for key in prompts}
    ref_logprob = [pair.chosen_ref_logprob for pair in pairs] + [pair.rejected_ref_logprob for pair in pairs]
    return {**joined, "mask": completions["attention_mask"], "ref_logprob": torch.tensor(ref_logprob)}
