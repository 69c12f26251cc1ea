"""Rewards: a number for each text, from the embedded world, a classifier or any Python function."""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import GRAMMAR


class Reward(Protocol):
    """Scores whole texts, prompt and completion together."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """One finite score a text, float32 [B]."""
        ...


class GrammarReward:
    """Log odds that a text of the embedded world is positive, exact and clipped.

    Args:
        grammar: The world that wrote the reviews.
    """

    def __init__(self, grammar: ReviewGrammar | None = None) -> None:
        self.grammar = grammar or ReviewGrammar()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Clipped log odds, float32 [B]."""
        return torch.tensor([self.grammar.clipped_log_odds(text) for text in texts])


class FunctionReward:
    """Any function from a list of texts to a list of numbers, checked.

    Args:
        name: What to call it in an error.
        function: Returns one number a text.

    Raises:
        ConfigurationError: When called, if the count is wrong or a score is not finite: with the text.
    """

    def __init__(self, name: str, function: Callable[[Sequence[str]], Sequence[float]]) -> None:
        self.name, self.function = name, function

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The function's scores, float32 [B]."""
        scores = torch.as_tensor(self.function(texts), dtype=torch.float32)
        if scores.shape != (len(texts),):
            raise ConfigurationError(
                f"reward_path: {self.name} must return {len(texts)} numbers for {len(texts)} texts, "
                f"got shape {tuple(scores.shape)}"
            )
        wrong = (~scores.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise ConfigurationError(
                f"reward_path: {self.name} gave {scores[wrong[0]].item()} for the text {texts[wrong[0]]!r}"
            )
        return scores


def load_reward(path: str) -> Reward:
    """The reward that `reward_path` names.

    Args:
        path: `"grammar"` for the embedded world, or `"package.module:function"`.

    Raises:
        ConfigurationError: If there is no such reward.
    """
    if path == GRAMMAR:
        return GrammarReward()
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigurationError(f"reward_path: {path} is neither 'grammar' nor 'package.module:function'")
    try:
        return FunctionReward(path, getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"reward_path: cannot import {path}: {error}") from None
