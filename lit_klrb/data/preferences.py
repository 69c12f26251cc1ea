"""Preferences: pairs of a chosen and a rejected completion of the same prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.data.batches import Batch, pad
from lit_klrb.data.corpora import CONVERSATION, open_splits
from lit_klrb.errors import ConfigurationError


class Preference(NamedTuple):
    """A prompt and two completions, as text."""

    prompt: str
    chosen: str
    rejected: str


def load_preferences(source: str) -> list[Preference]:
    """Load the preferences of a data set's train split.

    Args:
        source: A hub id, a folder, or a .parquet or .jsonl file with the columns prompt, chosen and rejected.

    Raises:
        ConfigurationError: If it cannot be read, has no rows, or a column is missing or is not text.
    """
    rows = open_splits("preferences", source).get("train", ())
    if not len(rows):
        raise ConfigurationError(f"{source} has no rows in its train split", key="preferences")
    given = [name for name in Preference._fields if name in rows.column_names]
    for name in given:
        if isinstance(rows[name][0], list):
            raise ConfigurationError(
                f"{source} has conversations in the column {name}; {CONVERSATION}", key="preferences"
            )
    missing = [name for name in Preference._fields if name not in given]
    if missing:
        raise ConfigurationError(
            f"{source} has no column {missing[0]}; its columns: {', '.join(rows.column_names)}",
            key="preferences",
        )
    preferences = [Preference(*row) for row in zip(*(rows[name] for name in Preference._fields), strict=True)]
    for preference in preferences:
        if not (all(isinstance(text, str) for text in preference) and preference.prompt):
            raise ConfigurationError(
                f"{source} has the row {preference}; rows must have three texts and "
                "a prompt that is not empty",
                key="preferences",
            )
    return preferences


class PreferencePair(NamedTuple):
    """Token ids of a prompt and two completions, and the log-probability of each under the reference."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_ref_logprob: float
    rejected_ref_logprob: float


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> Batch:
    """Collate B pairs into 2B sequences: all chosen completions, then all rejected ones.

    Args:
        pairs: The pairs of the batch.
        pad_token_id: The padding token, on the left of prompts and on the right of completions.

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
