"""Suggestions for misspelt names."""

import difflib
from collections.abc import Collection

# Options that must stay unset because training data are infinite, and what to set instead.
INSTEAD = dict.fromkeys(("trainer.max_epochs", "trainer.min_epochs"), "trainer.max_steps")


def suggestion(word: str, known: Collection[str]) -> str:
    """A question naming the known name that was probably meant, or the empty string.

    The last part of a dotted name counts most: a name that has the same one, then one whose words begin with
    the given letters, then one with the same word in it, then the most similar spelling. Of equally similar
    names it is the first.

    Args:
        word: The unknown name; dotted for a configuration key.
        known: The names that exist.

    Example:
        >>> suggestion("lr", ["lora", "learning_rate"]), suggestion("model.lr", ["model.learning_rate"])
        (' (did you mean learning_rate?)', ' (did you mean model.learning_rate?)')
        >>> suggestion("beta", ["kl.beta", "kl.final_beta"]), suggestion("nonsense", ["kl.beta"])
        (' (did you mean kl.beta?)', '')
        >>> suggestion("trainer.epochs", ["trainer.max_epochs", "trainer.max_steps"])
        ' (did you mean trainer.max_steps?)'
    """
    last = word.rpartition(".")[2].lower()
    for alike in (_same, _initials, _contains):
        found = [name for name in known if alike(last, name.rpartition(".")[2].lower())]
        if found:
            return _question(max(found, key=lambda name: _similarity(word, name)))
    # Of short words, half of the letters agree by chance
    similar = difflib.get_close_matches(word, known, n=1, cutoff=0.6 if len(last) > 4 else 0.75)
    return _question(similar[0]) if similar else ""


def _same(word: str, name: str) -> bool:
    return word == name


def _initials(word: str, name: str) -> bool:
    parts = name.split("_")
    return len(parts) > 1 and word == "".join(part[:1] for part in parts)


def _contains(word: str, name: str) -> bool:
    return len(word) > 3 and word.removesuffix("s") in (part.removesuffix("s") for part in name.split("_"))


def _similarity(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, word).ratio()


def _question(name: str) -> str:
    return f" (did you mean {INSTEAD.get(name, name)}?)"
