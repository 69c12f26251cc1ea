"""Properties of answers that a program can check, as rewards."""

import re
from collections.abc import Sequence
from typing import Any

# Common words of reviews.
_POSITIVE = {
    "amazing",
    "beautiful",
    "best",
    "enjoyed",
    "excellent",
    "fun",
    "good",
    "great",
    "love",
    "perfect",
}
_NEGATIVE = {"awful", "bad", "boring", "dull", "hate", "horrible", "poor", "stupid", "terrible", "worst"}

# Common words of French that are not English ones.
_FRENCH = {"dans", "de", "des", "du", "elle", "est", "et", "il", "la", "le", "les", "pas", "qui", "un", "une"}


def begins_as_json(completions: Sequence[Any]) -> list[float]:
    """Whether an answer begins with the key "answer" of a JSON object, 1 or 0; it may be cut before its end.

    Args:
        completions: Texts, or lists of messages that end with the answer.

    Example:
        >>> begins_as_json(['{"answer": "a', [{"role": "assistant", "content": "A hill."}]])
        [1.0, 0.0]
    """
    return [float(text.startswith('{"answer": "')) for text in _texts(completions)]


def begins_as_pirate(completions: Sequence[Any]) -> list[float]:
    """Whether an answer begins with "Arrr", 1 or 0.

    Example:
        >>> begins_as_pirate(["Arrr, a hill that spits fire, matey!", "A hill that spits fire."])
        [1.0, 0.0]
    """
    return [float(text.startswith("Arrr")) for text in _texts(completions)]


def is_short(completions: Sequence[Any]) -> list[float]:
    """Whether an answer is a sentence of under ten words, 1 or 0.

    Example:
        >>> is_short(["Water that falls from clouds.", "Water that", "a " * 8 + "b.", "a " * 9 + "b."])
        [1.0, 0.0, 1.0, 0.0]
    """
    ended = re.compile(r"\s*(\S+\s+){,8}\S*[.!?]\s*")
    return [float(bool(ended.fullmatch(text))) for text in _texts(completions)]


def in_french(completions: Sequence[Any]) -> list[float]:
    """Whether at least a fifth of an answer's words are common ones of French, 1 or 0.

    Example:
        >>> in_french(["C'est l'eau qui tombe des nuages.", "The water that falls from clouds."])
        [1.0, 0.0]
    """
    words = [re.findall("[^\\W\\d_]+", text.lower()) for text in _texts(completions)]
    return [float(sum(word in _FRENCH for word in text) >= max(len(text), 1) / 5) for text in words]


def answered(completions: Sequence[Any]) -> list[float]:
    """Whether an answer holds anything but blanks, 1 or 0.

    Example:
        >>> answered(["A hill.", " "])
        [1.0, 0.0]
    """
    return [float(bool(text.strip())) for text in _texts(completions)]


def sentiment(completions: Sequence[Any]) -> list[float]:
    """Positive words of an answer less negative ones: a reward that is a sum over words.

    Example:
        >>> sentiment(["A great film, beautiful and never boring.", "Awful!"])
        [1.0, -1.0]
    """
    words = [re.findall("[a-z]+", text.lower()) for text in _texts(completions)]
    return [float(sum((word in _POSITIVE) - (word in _NEGATIVE) for word in text)) for text in words]


def right_number(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Whether the last number of an answer is the right one, 1 or 0.

    Args:
        completions: Texts, or lists of messages that end with the answer.
        answer: The right numbers, a column of the data.

    Example:
        >>> right_number(["3 + 4 equals 7.", "The answer is 12"], ["7", "2"])
        [1.0, 0.0]
    """
    found = [re.findall(r"\d+", text)[-1:] for text in _texts(completions)]
    return [float(numbers == [right]) for numbers, right in zip(found, answer, strict=True)]


def _texts(completions: Sequence[Any]) -> list[str]:
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]
