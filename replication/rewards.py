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
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(text.startswith('{"answer": "')) for text in texts]
