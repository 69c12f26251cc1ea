"""Padding of token ids to batches."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

# Tensors by name; a batch of prompts may also have `rows`, a list of their other columns for rewards.
Batch = dict[str, Any]


def pad(rows: Sequence[Sequence[int]], pad_token_id: int, side: Literal["left", "right"]) -> Batch:
    """Pad rows of token ids to equal length, prompts on the left, which completions follow.

    Returns:
        `tokens` (int64) and `attention_mask` (bool), both [B, longest row].

    Example:
        >>> pad([[5, 6], [7]], pad_token_id=0, side="left")["tokens"].tolist()
        [[5, 6], [0, 7]]
    """
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=pad_token_id, padding_side=side),
        "attention_mask": pad_sequence(masks, batch_first=True, padding_side=side),
    }
