"""Rows of token ids as rectangles."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Batch = dict[str, Tensor]


def pad(rows: Sequence[Sequence[int]], pad_token_id: int, side: Literal["left", "right"]) -> Batch:
    """Rows of ids as a rectangle with its mask.

    Args:
        rows: Token ids of each example.
        pad_token_id: Fills the rest.
        side: "left" for prompts (completions follow them), "right" for everything else.

    Returns:
        `tokens` (int64) and `attention_mask` (bool), both [B, longest row].

    Example:
        >>> pad([[5, 6], [7]], pad_token_id=0, side="left")["tokens"].tolist()
        [[5, 6], [0, 7]]
    """
    width = max(len(row) for row in rows)
    tokens = torch.full((len(rows), width), pad_token_id)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(len(row))
        tokens[index, place] = torch.tensor(row, dtype=torch.long)
        mask[index, place] = True
    return {"tokens": tokens, "attention_mask": mask}


def classifier_batch(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_tokens: int) -> Batch:
    """Texts as a classifier reads them, with the special tokens its tokenizer adds.

    Args:
        tokenizer: The classifier's.
        texts: B texts.
        max_tokens: Longer ones lose their end.

    Returns:
        Right-padded `tokens` and `attention_mask`, [B, N].
    """
    rows = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    return pad(rows, tokenizer.pad_token_id, side="right")
