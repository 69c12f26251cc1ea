"""Rewards for the tests."""


def length(texts):
    return [float(len(text.split())) for text in texts]


def signed_length(completions, *, sign, **columns):
    """How many letters, times the sign of the prompt's row."""
    return [float(factor * len(text)) for text, factor in zip(completions, sign, strict=True)]
