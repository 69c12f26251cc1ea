"""Properties of answers that a program can check, as rewards."""

from collections.abc import Sequence
from typing import Any


def begins_as_json(completions: Sequence[Any]) -> list[float]:
    """Whether an answer begins with the key "answer" of a JSON object, 1 or 0; it may be cut before its end.

    Args:
        completions: Texts, or lists of messages that end with the answer.

    Example:
        >>> begins_as_json(['{"answer": "a', [{"role": "assistant", "content": "A hill."}]])
        [1.0, 0.0]
    """
    return [float(text.startswith('{"answer": "')) for text in _texts(completions)]


def short_answer(completions: Sequence[Any]) -> list[float]:
    """Whether an answer has at most twelve words, 1 or 0.

    Example:
        >>> short_answer(["A hill that spits fire.", "word " * 13])
        [1.0, 0.0]
    """
    return [float(len(text.split()) <= 12) for text in _texts(completions)]


def articles(completions: Sequence[Any]) -> list[float]:
    """The number of articles of an answer: a reward that is a sum over words.

    Example:
        >>> articles(["A hill that spits the fire."])
        [2.0]
    """
    return [
        float(sum(word in {"a", "an", "the"} for word in text.lower().split()))
        for text in _texts(completions)
    ]


def _texts(completions: Sequence[Any]) -> list[str]:
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]
