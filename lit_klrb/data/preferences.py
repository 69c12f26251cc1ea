"""Pairs of completions of one prompt, one preferred to the other."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.data.batches import Batch, pad


class PreferencePair(NamedTuple):
    """Token ids of a prompt and two completions, and the reference's log-probability of each completion."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_ref_logprob: float
    rejected_ref_logprob: float


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> Batch:
    """A batch of B pairs as 2B sequences, all chosen completions before all rejected ones.

    Args:
        pairs: The pairs of the batch.
        pad_token_id: Fills prompts on the left and completions on the right.

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
