"""A reward for the tests: how many words."""


def length(texts):
    return [float(len(text.split())) for text in texts]
